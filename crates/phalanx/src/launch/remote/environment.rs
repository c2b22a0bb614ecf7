//! Which variables are sent to other hosts.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use super::protocol::ToLauncher;
use crate::error::{Error, Result};

/// Variables that belong to a machine, a login or a terminal, and are not sent.
const NOT_FORWARDED: [&str; 29] = [
    "_",
    "COLUMNS",
    "DBUS_SESSION_BUS_ADDRESS",
    "DISPLAY",
    "GPG_TTY",
    "HOME",
    "HOST",
    "HOSTNAME",
    "INVOCATION_ID",
    "JOURNAL_STREAM",
    "KRB5CCNAME",
    "LINES",
    "LOGNAME",
    "MAIL",
    "NOTIFY_SOCKET",
    "OLDPWD",
    "PET_LOCAL_ADDR",
    "PHALANX_BIND",
    "PHALANX_RSH",
    "PWD",
    "SHELL",
    "SHLVL",
    "STY",
    "TERM",
    "USER",
    "WAYLAND_DISPLAY",
    "WINDOWID",
    "XAUTHORITY",
    "XPC_SERVICE_NAME",
];
const NOT_FORWARDED_PREFIXES: [&str; 7] =
    ["BASH_FUNC_", "LISTEN_", "SSH_", "SUDO_", "SYSTEMD_", "TMUX", "XDG_"];

/// What a launcher gets first: the working directory and the environment of this command.
pub(super) fn environment() -> Result<ToLauncher> {
    let folder = std::env::current_dir()
        .map_err(|error| Error::io("cannot find the current working directory", error))?;
    Ok(ToLauncher::Environment { folder, variables: forwarded(std::env::vars_os()) })
}

/// The variables of `all` that are sent to other hosts.
fn forwarded(all: impl Iterator<Item = (OsString, OsString)>) -> Vec<(Vec<u8>, Vec<u8>)> {
    all.filter(|(name, _)| is_forwarded(name))
        .map(|(name, value)| (name.into_vec(), value.into_vec()))
        .collect()
}

fn is_forwarded(name: &OsStr) -> bool {
    let name = name.as_bytes();
    !NOT_FORWARDED.iter().any(|other| other.as_bytes() == name)
        && !NOT_FORWARDED_PREFIXES.iter().any(|prefix| name.starts_with(prefix.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_jobs_variables_go_and_a_logins_stay() {
        let all = [
            "PATH",
            "CUDA_VISIBLE_DEVICES",
            "PET_MAX_RESTARTS",
            "HOME",
            "SSH_AUTH_SOCK",
            "XDG_RUNTIME_DIR",
            "PWD",
        ]
        .map(|name| (OsString::from(name), OsString::from("x")));
        let names: Vec<_> = forwarded(all.into_iter()).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, [&b"PATH"[..], b"CUDA_VISIBLE_DEVICES", b"PET_MAX_RESTARTS"]);
    }
}
