//! The credentials of a process.

use crate::error::Result;
use crate::key::JobKey;
use crate::tls::Tls;

/// With these the processes of a job authenticate each other. Each may be missing; the two do not depend on
/// each other.
#[derive(Clone, Debug, Default)]
pub struct Credentials {
    /// Both sides of a connection prove that they know it.
    pub key: Option<JobKey>,
    /// Both sides of a connection show a certificate, and the connection is encrypted.
    pub tls: Option<Tls>,
}

impl Credentials {
    /// The credentials of this process's job: [`JobKey::from_env`] and [`Tls::from_env`].
    ///
    /// # Errors
    /// As those of the two.
    pub fn from_env() -> Result<Self> {
        Ok(Self { key: JobKey::from_env()?, tls: Tls::from_env()? })
    }

    /// No credentials.
    #[cfg(any(test, feature = "testing"))]
    pub fn none() -> &'static Self {
        static NONE: Credentials = Credentials { key: None, tls: None };
        &NONE
    }
}

impl From<JobKey> for Credentials {
    fn from(key: JobKey) -> Self {
        Self { key: Some(key), ..Self::default() }
    }
}
