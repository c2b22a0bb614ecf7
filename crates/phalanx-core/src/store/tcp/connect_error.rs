//! Why a client cannot connect to a store, in words for the user: what is there instead, and what to do.

use std::io;
use std::time::Duration;

use super::client_connection::ClientCredentials;
use super::resolve::NO_ADDRESS_REMEDY;
use crate::error::Error;
use crate::interrupt;
use crate::tls::Refusal;
use crate::wire::tls;

/// Why an attempt to connect failed.
pub(super) enum ConnectError {
    /// Nothing listens there, or not yet.
    NotListening(io::Error),
    /// It closed the connection.
    Closed,
    /// It accepts connections but sends nothing.
    NoAnswer,
    /// It is not a store.
    NotAStore(String),
    /// It is a store, but does not know the key.
    WrongKey,
    /// TLS failed.
    Tls(io::Error),
    /// The name has no address, or its address is not known yet.
    NoAddress(io::Error),
    /// This process has no descriptor, or no thread, left.
    OutOfResources(Error),
    /// This thread's check has ended the wait.
    Interrupted(Error),
}

/// The error for an answer to the greeting that is not a store's.
pub(super) fn unexpected_answer(answer: &[u8]) -> ConnectError {
    if tls::is_alert(answer) {
        return ConnectError::Tls(Refusal::wanted());
    }
    ConnectError::NotAStore(format!("it answers {:?}", answer.escape_ascii().to_string()))
}

pub(super) fn no_answer(error: io::Error) -> ConnectError {
    if let Some(cause) = interrupt::cause(&error) {
        return ConnectError::Interrupted(cause);
    }
    match error.kind() {
        io::ErrorKind::TimedOut => ConnectError::NoAnswer,
        _ if Refusal::remedy(&error).is_some() => ConnectError::Tls(error),
        _ => ConnectError::Closed,
    }
}

pub(super) fn no_address(address: &str, error: io::Error) -> Error {
    Error::environment(format!("the name in {address} has no address"))
        .with_source(error)
        .in_operation("store connect", None)
        .with_remedy(NO_ADDRESS_REMEDY)
}

pub(super) fn not_listening(address: &str, waited: Duration, error: io::Error) -> Error {
    let cause = format!("no store at {address} after {:.1} s: {error}", waited.as_secs_f64());
    Error::timeout(cause).in_operation("store connect", None).with_remedy(
        "does rank 0, or the launcher, run, and are MASTER_ADDR and MASTER_PORT those of its host? A firewall between \
         the hosts has the same effect",
    )
}

pub(super) fn not_a_store(address: &str, what: &str) -> Error {
    Error::protocol(format!("what listens on {address} is not a store: {what}"))
        .in_operation("store connect", None)
        .with_remedy("another program has this port: set MASTER_PORT to a free one for every rank")
}

pub(super) fn tls_failed(address: &str, error: io::Error) -> Error {
    let remedy = Refusal::remedy(&error).unwrap_or("does this host have /dev/urandom?");
    Error::protocol(format!("cannot log in to the store at {address}: {error}"))
        .in_operation("store connect", None)
        .with_remedy(remedy)
}

pub(super) fn closes(address: &str, credentials: &ClientCredentials) -> Error {
    let error = not_a_store(address, "it closes the connection during the greeting");
    error.with_remedy(match (&credentials.tls, &credentials.secret) {
        (Some(_), _) => {
            "if it is a store, it does not use TLS, as PyTorch's does not: unset PHALANX_TLS_CA, PHALANX_TLS_CERT and \
             PHALANX_TLS_KEY under torchrun. Otherwise another program has this port"
        }
        (None, Some(_)) => {
            "if it is a store, it has no job key: give its launcher the same one (--job-key-file), or unset \
             PHALANX_JOB_KEY_FILE under torchrun. Otherwise another program has this port"
        }
        (None, None) => {
            "if it is the store of a job with a key, name the key's file with PHALANX_JOB_KEY_FILE or --job-key-file, or \
             let its launcher admit every client with --open-store. Otherwise another program has this port: set \
             MASTER_PORT to a free one for every rank"
        }
    })
}

pub(super) fn wrong_key(address: &str) -> Error {
    Error::protocol(format!("the store at {address} does not know this job's key"))
        .in_operation("store connect", None)
        .with_remedy(
            "give every launcher the same --job-key-file, or every rank the same PHALANX_JOB_KEY_FILE; if they have, \
             this is the store of another job",
        )
}
