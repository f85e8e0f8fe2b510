//! What is fuzzed of the control socket: a line from a client, and a line from a host. For the fuzz targets alone.

use super::protocol::{self, Method, Operation};

/// Reads a client's line, and what a `migrate` in it asks for.
///
/// # Errors
/// What the client is answered.
pub fn request(line: &[u8]) -> Result<(), String> {
    let request = protocol::parse(line).map_err(|malformed| malformed.error)?;
    match request.method {
        Method::Guest(Operation::Migrate(params)) => {
            params.plan().map(drop).map_err(|error| protocol::shortened(&error))
        }
        _ => Ok(()),
    }
}

/// Reads a host's line.
///
/// # Errors
/// It makes no sense.
pub fn answer(line: &[u8]) -> Result<(), String> {
    super::client::heard(line).map(drop)
}
