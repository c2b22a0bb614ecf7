//! The options about TLS.

use std::path::{Path, PathBuf};

use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};

/// The files of a launcher's certificates, and of its workers'.
#[derive(Args, Debug)]
pub(crate) struct TlsOptions {
    /// The certificate (PEM) of the job's or the cluster's own CA. With it, --tls-cert and --tls-key, the store and the
    /// ranks use TLS, and accept only certificates of that CA. Give it on every node, or on none
    #[arg(long, value_name = "FILE", env = "PHALANX_TLS_CA", hide_env_values = true, value_parser = path())]
    tls_ca: Option<PathBuf>,

    /// The certificate (PEM) of this launcher and its workers
    #[arg(long, value_name = "FILE", env = "PHALANX_TLS_CERT", hide_env_values = true, value_parser = path())]
    tls_cert: Option<PathBuf>,

    /// The private key (PEM) of that certificate; only this user may have access to the file
    #[arg(long, value_name = "FILE", env = "PHALANX_TLS_KEY", hide_env_values = true, value_parser = path())]
    tls_key: Option<PathBuf>,
}

/// A path that may be empty: launchers set empty variables for workers that have none.
pub(crate) fn path() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().map(PathBuf::from)
}

impl TlsOptions {
    /// An empty variable counts as none.
    fn files(&self) -> [Option<&PathBuf>; 3] {
        [&self.tls_ca, &self.tls_cert, &self.tls_key]
            .map(|file| file.as_ref().filter(|file| !file.as_os_str().is_empty()))
    }

    pub(crate) fn is_given(&self) -> bool {
        self.files().iter().any(Option::is_some)
    }

    /// `job` with these files, if they are given; `tell` sets them.
    pub(crate) fn apply<J>(
        &self,
        job: J,
        tell: impl FnOnce(J, &Path, &Path, &Path) -> phalanx::Result<J>,
    ) -> Result<J, String> {
        match self.files() {
            [None, None, None] => Ok(job),
            [Some(ca), Some(certificate), Some(key)] => {
                tell(job, ca, certificate, key).map_err(|error| error.to_string())
            }
            _ => Err(
                "--tls-ca, --tls-cert and --tls-key go together, as do PHALANX_TLS_CA, PHALANX_TLS_CERT and \
                      PHALANX_TLS_KEY: give all three, or none"
                    .to_owned(),
            ),
        }
    }
}
