//! `phalanx certgen`.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use clap::Args;
use phalanx_sys::open;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

/// Make a CA and certificates for jobs that speak TLS
///
/// FOLDER/ca.pem is the CA's certificate, for --tls-ca everywhere; HOST.pem and HOST.key are for --tls-cert and --tls-key
/// on that host. If the folder has a CA already, it signs the certificates of further hosts. FOLDER/ca.key signs
/// certificates: no host needs it. Anyone who can read it, or a host's key, can join the jobs.
#[derive(Args, Debug)]
pub(crate) struct Certgen {
    /// The folder of these files; it is made if it does not exist
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,

    /// The hosts that get certificates. The names only tell the files apart; connections do not check them
    #[arg(required = true, value_name = "HOST")]
    hosts: Vec<String>,

    /// How long they are valid, from now
    #[arg(long, value_name = "DAYS", default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=36_500))]
    days: u32,
}

/// The name of the CA's files.
const CA: &str = "ca";
/// How long a CA is valid at least.
const DAYS_OF_CA: u32 = 3650;
/// The most bytes of its key's file.
const KEY_LIMIT: u64 = 64 << 10;
const DAY: Duration = Duration::from_secs(24 * 3600);

pub(crate) fn run(options: &Certgen) -> ExitCode {
    match make(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            let _ = writeln!(io::stderr(), "phalanx: {message}");
            ExitCode::FAILURE
        }
    }
}

fn make(options: &Certgen) -> Result<(), String> {
    let Certgen { folder, hosts, days } = options;
    if hosts.iter().any(|host| host == CA) {
        return Err(format!("{CA} is the name of the CA's own files: give the host another one"));
    }
    if let Some(host) = hosts.iter().find(|host| !is_file_name(host)) {
        return Err(format!("{host:?} is no name for a file: use letters, digits, dots and dashes"));
    }
    // All, before anything is made: a part of them would be in the way of the next call.
    for (index, host) in hosts.iter().enumerate() {
        if hosts[..index].contains(host) {
            return Err(format!("{host} is named twice: give each host once"));
        }
        for file in [format!("{host}.key"), format!("{host}.pem")] {
            let file = folder.join(file);
            if file.symlink_metadata().is_ok() {
                return Err(format!(
                    "{} cannot be written: it exists already; leave out {host}, or remove its .key and .pem for new ones",
                    file.display()
                ));
            }
        }
    }
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
        .map_err(|error| format!("{} cannot be made: {error}", folder.display()))?;
    let mut new_files = NewFiles { folder, made: Vec::new() };
    let made = make_all(hosts, *days, &mut new_files);
    if made.is_err() {
        new_files.remove();
    }
    made
}

fn make_all(hosts: &[String], days: u32, files: &mut NewFiles<'_>) -> Result<(), String> {
    let ca = ca(files, days.max(DAYS_OF_CA))?;
    hosts.iter().try_for_each(|host| {
        let (key, mut params) = new(host, days)?;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        // Each rank and each launcher is both client and server.
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let certificate = params.signed_by(&key, &ca).map_err(|error| error.to_string())?;
        files.write(&format!("{host}.key"), &key.serialize_pem(), 0o600)?;
        files.write(&format!("{host}.pem"), &certificate.pem(), 0o644)
    })
}

/// The CA of the folder of `files`, which is made if there is none.
fn ca(files: &mut NewFiles<'_>, days: u32) -> Result<Issuer<'static, KeyPair>, String> {
    let folder = files.folder;
    let file = folder.join("ca.key");
    let read = match open::regular(&file, OpenOptions::new().read(true)) {
        Ok(opened) => Some(read(&opened, folder, &file)),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => Some(Err(error.to_string())),
    };
    let (key, mut params) = new("phalanx CA", days)?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let key = match read {
        // Issuing needs nothing that differs between its certificate and a new one.
        Some(read) => read.map_err(|error| format!("{} cannot be used: {error}", file.display()))?,
        // A new key would not fit the certificate that the hosts have.
        None if folder.join("ca.pem").symlink_metadata().is_ok() => {
            return Err(format!(
                "{} has the certificate ca.pem, and not its key ca.key: put the key back, or take another folder for a new CA",
                folder.display()
            ));
        }
        None => {
            files.write("ca.key", &key.serialize_pem(), 0o600)?;
            let certificate = params.self_signed(&key).map_err(|error| error.to_string())?;
            files.write("ca.pem", &certificate.pem(), 0o644)?;
            key
        }
    };
    Ok(Issuer::new(params, key))
}

/// The CA's key in `file`, which is `opened`, if the CA may be used again.
fn read(opened: &File, folder: &Path, file: &Path) -> Result<KeyPair, String> {
    // Of what is read, not of what has the name by now.
    let about = opened.metadata().map_err(|error| error.to_string())?;
    let user = rustix::process::geteuid().as_raw();
    if about.uid() != user {
        return Err(format!(
            "it belongs to user {}, and this command runs as {user}: take another folder",
            about.uid()
        ));
    }
    if about.mode() & 0o077 != 0 {
        return Err(format!(
            "others may use it (mode {:o}): chmod 600 {}, and make a new CA in another folder if others may have read it",
            about.mode() & 0o777,
            file.display()
        ));
    }
    let certificate = folder.join("ca.pem");
    if !certificate.try_exists().unwrap_or(false) {
        return Err(format!(
            "its certificate {} is missing: put it back, or take another folder",
            certificate.display()
        ));
    }
    let text = io::read_to_string(opened.take(KEY_LIMIT)).map_err(|error| error.to_string())?;
    KeyPair::from_pem(&text).map_err(|error| error.to_string())
}

/// A new key, and the fields that all certificates have in common.
fn new(name: &str, days: u32) -> Result<(KeyPair, CertificateParams), String> {
    let key = KeyPair::generate().map_err(|error| error.to_string())?;
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    let now = SystemTime::now();
    // The clocks of hosts differ.
    params.not_before = (now - DAY).into();
    params.not_after = (now + DAY * days).into();
    params.use_authority_key_identifier_extension = true;
    Ok((key, params))
}

/// What this call has made in a folder.
struct NewFiles<'a> {
    folder: &'a Path,
    made: Vec<PathBuf>,
}

impl NewFiles<'_> {
    /// Existing files are not replaced.
    fn write(&mut self, name: &str, text: &str, mode: u32) -> Result<(), String> {
        let path = self.folder.join(name);
        let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&path);
        let written = file.and_then(|mut file| {
            self.made.push(path.clone());
            file.write_all(text.as_bytes())
        });
        written.map_err(|error| format!("{} cannot be written: {error}", path.display()))
    }

    /// Removes them all: a key without its certificate would be in the way of the next call.
    fn remove(&self) {
        for file in &self.made {
            let _ = fs::remove_file(file);
        }
    }
}

fn is_file_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    name.bytes().all(plain) && name.starts_with(|first: char| first.is_ascii_alphanumeric())
}
