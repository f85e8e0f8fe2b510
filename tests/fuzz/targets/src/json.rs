//! JSON that was right, changed in a few places: bytes alone hardly ever get past a parser.

use arbitrary::{Result, Unstructured};
use serde_json::Value;

/// Numbers that lie at some edge.
const EDGES: [u64; 20] = [
    0,
    1,
    2,
    7,
    63,
    64,
    255,
    256,
    4095,
    4096,
    65_535,
    65_536,
    1 << 20,
    1 << 31,
    u32::MAX as u64,
    1 << 32,
    (1 << 52) - 1,
    1 << 63,
    u64::MAX - 1,
    u64::MAX,
];

/// Changes up to four values of `text`, or a few of its bytes; or takes other text in its place.
pub(crate) fn change(u: &mut Unstructured<'_>, text: &[u8]) -> Result<Vec<u8>> {
    let Ok(mut value) = serde_json::from_slice::<Value>(text) else {
        return Ok(text.to_vec());
    };
    match u.int_in_range(0..=9)? {
        0 => {
            let mut bytes = text.to_vec();
            for _ in 0..u.int_in_range(1..=3)? {
                if let Some(last) = bytes.len().checked_sub(1) {
                    bytes[u.int_in_range(0..=last)?] = u.arbitrary()?;
                }
            }
            return Ok(bytes);
        }
        1 => return Ok(u.peek_bytes(u.len().min(200)).unwrap_or_default().to_vec()),
        _ => {}
    }
    for _ in 0..u.int_in_range(0..=4)? {
        let mut all = Vec::new();
        leaves(&mut value, &mut all);
        if let Some(last) = all.len().checked_sub(1) {
            let at = u.int_in_range(0..=last)?;
            alter(u, all.swap_remove(at))?;
        }
    }
    Ok(serde_json::to_vec(&value).unwrap_or_default())
}

/// Every value that is no object, and no short array of anything but many numbers: those are looked into.
fn leaves<'a>(value: &'a mut Value, all: &mut Vec<&'a mut Value>) {
    let whole = match &*value {
        Value::Object(_) => false,
        Value::Array(values) => {
            let numbers = values.len() > 8 && values.iter().all(Value::is_number);
            values.is_empty() || values.len() >= 64 || numbers
        }
        _ => true,
    };
    if whole {
        return all.push(value);
    }
    match value {
        Value::Object(fields) => fields.values_mut().for_each(|value| leaves(value, all)),
        Value::Array(values) => values.iter_mut().for_each(|value| leaves(value, all)),
        _ => {}
    }
}

fn alter(u: &mut Unstructured<'_>, value: &mut Value) -> Result<()> {
    *value = match (u.int_in_range(0..=7)?, &mut *value) {
        (0, _) => Value::Null,
        (1, Value::Array(values)) => {
            values.pop();
            return Ok(());
        }
        (2, Value::Array(values)) => {
            let first = values.first().cloned().unwrap_or(0.into());
            values.push(first);
            return Ok(());
        }
        (_, Value::Array(values)) if !values.is_empty() => {
            let at = u.int_in_range(0..=values.len() - 1)?;
            values[at] = number(u)?.into();
            return Ok(());
        }
        (_, Value::Bool(is)) => (!*is).into(),
        (1..=3, Value::String(text)) => text.chars().take(u.int_in_range(0..=12)?).collect::<String>().into(),
        (_, Value::String(text)) => {
            let mut bytes = text.clone().into_bytes();
            if let Some(last) = bytes.len().checked_sub(1) {
                let at = u.int_in_range(0..=last)?;
                bytes[at] = *u.choose(b"0f9a\xffz")?;
            }
            String::from_utf8_lossy(&bytes).into_owned().into()
        }
        _ => number(u)?.into(),
    };
    Ok(())
}

fn number(u: &mut Unstructured<'_>) -> Result<u64> {
    Ok(match u.int_in_range(0..=3)? {
        0 => u.arbitrary()?,
        1 => u.int_in_range(0..=20)?,
        _ => *u.choose(&EDGES)?,
    })
}
