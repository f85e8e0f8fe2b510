//! The flags that describe a guest's balloon.

use crate::Error;
use balloon::{Dialect, DiscardPolicy};
use clap::ValueEnum;
use pages::Layout;

/// The balloon's dialect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum BalloonChoice {
    /// Free page hinting, as virtio 1.x has it
    #[default]
    Standard,
    /// Page bitmaps and requests, as the patches of June 2016 have them
    Bitmap,
    /// Page bitmaps for inflating and deflating alone, as the RFC of May 2016 has them
    BitmapRfc,
    /// No balloon
    Off,
}

/// What becomes of the memory of pages that go into the balloon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DiscardChoice {
    /// It stays; a migration may leave it out
    Mark,
    /// The host has it back
    AtOnce,
}

/// The balloon of a guest with RAM of `layout`.
pub(crate) fn config(
    choice: BalloonChoice,
    discard: Option<DiscardChoice>,
    layout: &Layout,
) -> Result<Option<balloon::Config>, Error> {
    let dialect = match choice {
        BalloonChoice::Standard => Dialect::Standard,
        BalloonChoice::Bitmap => Dialect::Bitmap,
        BalloonChoice::BitmapRfc => Dialect::BitmapRfc,
        BalloonChoice::Off if discard.is_some() => {
            return Err(Error::Usage(
                "--balloon-discard needs a balloon, and there is none with --balloon off".to_owned(),
            ));
        }
        BalloonChoice::Off => return Ok(None),
    };
    let mut config = softguest::default_balloon(dialect, layout);
    match discard {
        None => {}
        Some(DiscardChoice::Mark) => config.discard = DiscardPolicy::MarkOnly,
        Some(DiscardChoice::AtOnce) => config.discard = DiscardPolicy::AtOnce,
    }
    Ok(Some(config))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_balloon_has_its_dialects_features_and_discards_as_told() {
        let small = Layout::pc(8 << 18).unwrap();
        let large = Layout::flat((32 << 18) + 1).unwrap();
        let features = |choice, layout: &Layout| config(choice, None, layout).unwrap().map(|config| config.features);
        assert_eq!(features(BalloonChoice::Standard, &small), Some(0x1f));
        assert_eq!(features(BalloonChoice::Bitmap, &small), Some(0x1f));
        assert_eq!(
            features(BalloonChoice::Bitmap, &large),
            Some(0x17),
            "no bitmaps past 32 GiB"
        );
        assert_eq!(features(BalloonChoice::BitmapRfc, &large), Some(0xf));
        assert_eq!(features(BalloonChoice::Off, &small), None);
        let discard = |choice, discard| config(choice, discard, &small).unwrap().unwrap().discard;
        assert_eq!(discard(BalloonChoice::Standard, None), DiscardPolicy::AtOnce);
        assert_eq!(discard(BalloonChoice::Bitmap, None), DiscardPolicy::MarkOnly);
        let (mark, at_once) = (Some(DiscardChoice::Mark), Some(DiscardChoice::AtOnce));
        assert_eq!(discard(BalloonChoice::Standard, mark), DiscardPolicy::MarkOnly);
        assert_eq!(discard(BalloonChoice::BitmapRfc, at_once), DiscardPolicy::AtOnce);
        assert!(config(BalloonChoice::Off, mark, &small).is_err());
    }
}
