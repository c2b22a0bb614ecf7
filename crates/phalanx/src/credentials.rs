//! What a process proves itself with.

use crate::error::Result;
use crate::key::JobKey;
use crate::tls::Tls;

/// By what a process is known to the others of its job, and they to it. Each may be missing; the two do not depend on
/// each other.
#[derive(Clone, Debug, Default)]
pub struct Credentials {
    /// Both ends of a connection prove that they know it.
    pub key: Option<JobKey>,
    /// Both ends of a connection show a certificate, and what crosses it is encrypted.
    pub tls: Option<Tls>,
}

impl Credentials {
    /// Those of this process's job: [`JobKey::from_env`] and [`Tls::from_env`].
    ///
    /// # Errors
    /// As those of the two.
    pub fn from_env() -> Result<Self> {
        Ok(Self { key: JobKey::from_env()?, tls: Tls::from_env()? })
    }

    /// Nothing to prove anything with.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn none() -> &'static Self {
        static NONE: Credentials = Credentials { key: None, tls: None };
        &NONE
    }
}

impl From<JobKey> for Credentials {
    fn from(key: JobKey) -> Self {
        Self { key: Some(key), ..Self::default() }
    }
}
