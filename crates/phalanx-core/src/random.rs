//! Unpredictable random numbers from the system.

use crate::error::{Error, Result};

/// Random bytes.
///
/// # Errors
/// If the system returns none.
pub fn bytes<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| {
        Error::environment(format!("the system's random number generator failed: {error}"))
            .with_remedy("does the filter of this container allow getrandom, or is there a /dev/urandom?")
    })?;
    Ok(bytes)
}

/// A random number.
///
/// # Errors
/// If the system returns none.
pub fn number() -> Result<u64> {
    bytes().map(u64::from_le_bytes)
}
