//! Jobs and their keys: who is let in, who is not, and what people are told.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;

use crate::support::{SUM, bare, exit_code, free_port, limit, node, output, phalanx, send, text};
use phalanx::store::{Store, TcpStore};
use phalanx::{Deadline, JobKey};

/// Prints what it knows, and stays.
const STAY: &str = "echo $MASTER_PORT $PHALANX_JOB_KEY_FILE; exec sleep 60";

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

fn keygen(path: &Path) -> std::process::Output {
    Command::new(env!("CARGO_BIN_EXE_phalanx")).arg("keygen").arg(path).output().unwrap()
}

/// Starts it, and kills it when it takes too long.
fn spawned(mut command: Command) -> Child {
    let child = command.spawn().unwrap();
    limit(&child);
    child
}

#[test]
fn a_job_has_a_key_of_its_own_which_is_lent_and_gone_with_it() {
    let mut keys = Vec::new();
    for _ in 0..2 {
        let mut child = phalanx(&["--nproc-per-node", "2"], STAY).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().take(2);
        let words: Vec<String> = lines.map(|line| line.unwrap()["[0] ".len()..].to_owned()).collect();
        assert_eq!(words[0], words[1]);
        let (port, path) = words[0].split_once(' ').unwrap();
        let key = JobKey::read(path).unwrap();
        let secret = fs::read_to_string(path).unwrap();
        // Neither in arguments nor in the environment of anybody.
        let workers = fs::read_to_string(format!("/proc/{0}/task/{0}/children", child.id())).unwrap();
        for process in workers.split_whitespace().map(String::from).chain([child.id().to_string()]) {
            for place in ["cmdline", "environ"] {
                let bytes = fs::read(format!("/proc/{process}/{place}")).unwrap_or_default();
                assert!(!text(&bytes).contains(secret.trim()));
            }
        }
        let store = TcpStore::connect_with_key(format!("127.0.0.1:{port}"), &key, soon()).unwrap();
        store.set("key", b"value", soon()).unwrap();
        let stranger = JobKey::generate().unwrap();
        let refused = TcpStore::connect_with_key(format!("127.0.0.1:{port}"), &stranger, soon());
        assert!(refused.unwrap_err().to_string().contains("does not know this job's key"));
        send(&child, Signal::TERM);
        assert_eq!(exit_code(&mut child), Some(143));
        assert!(JobKey::read(path).is_err(), "it is still there");
        keys.push(secret);
    }
    assert_ne!(keys[0], keys[1]);
}

/// What PyTorch's clients send first, with a ping; prints how many bytes are answered.
fn plain_client(port: &str) -> Command {
    let script = format!(
        r"exec 3<>/dev/tcp/127.0.0.1/{port}; printf '\000\316\367\205\074\015\007\000\000\000' >&3; head -c 4 <&3 | wc -c"
    );
    let mut command = Command::new("bash");
    command.args(["-c", &script]);
    command
}

/// Whether a client that runs this command has been answered with so many bytes.
fn answered(mut command: Command) -> u32 {
    text(&command.output().unwrap().stdout).trim().parse().unwrap()
}

#[test]
fn pytorchs_clients_are_let_in_if_they_are_this_users() {
    pytorchs_clients(|_, _| false);
}

#[test]
#[ignore = "needs root, which can be another user: .ci/full runs it"]
fn pytorchs_clients_of_other_users_are_let_in_if_they_may_and_told_of_if_not() {
    pytorchs_clients(|port, open| {
        let mut other = plain_client(port);
        other.uid(65_534);
        assert_eq!(answered(other), if open { 4 } else { 0 });
        !open
    });
}

/// Clients of this user, and then `others` at the port of a job whose store is open to everybody or not; gives whether some were
/// refused.
fn pytorchs_clients(others: impl Fn(&str, bool) -> bool) {
    for open in [false, true] {
        let options: &[&str] = if open { &["--open-store"] } else { &[] };
        let mut child = phalanx(options, STAY).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let port = line["[0] ".len()..].split(' ').next().unwrap();
        assert_eq!(answered(plain_client(port)), 4);
        let refused = others(port, open);
        send(&child, Signal::TERM);
        assert_eq!(exit_code(&mut child), Some(143));
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        let told = said.contains("a client at 127.0.0.1 was not let into the store")
            && said.contains("--open-store");
        assert_eq!(told, refused, "{said}");
    }
}

#[test]
fn nodes_with_the_same_key_make_one_job() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("job.key");
    assert!(keygen(&path).status.success());
    let again = keygen(&path);
    assert!(
        !again.status.success() && text(&again.stderr).contains("not there yet"),
        "{}",
        text(&again.stderr)
    );
    let (port, file) = (free_port(), path.to_str().unwrap());
    let nodes = ["0", "1"]
        .map(|rank| spawned(node(rank, &port, &["--nproc-per-node", "2", "--job-key-file", file], SUM)));
    for child in nodes {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        // On a slow machine a rank may warn that it waits.
        let said = text(&output.stderr);
        assert!(!said.contains("this job has no key") && !said.contains("was not let into"), "{said}");
    }
}

#[test]
fn a_node_with_another_key_or_none_is_refused_and_both_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let [ours, theirs] = ["ours", "theirs"].map(|name| {
        let path = folder.path().join(name);
        assert!(keygen(&path).status.success());
        path.to_str().unwrap().to_owned()
    });
    let limits = ["--rdzv-conf", "join_timeout=6"];
    for (options, remedy) in [
        (&["--job-key-file", &theirs][..], "same --job-key-file"),
        (&[], "with PHALANX_JOB_KEY_FILE or --job-key-file"),
    ] {
        let port = free_port();
        let first = spawned(node("0", &port, &[&["--job-key-file", &ours], &limits[..]].concat(), "true"));
        let second = output(node("1", &port, &[options, &limits[..]].concat(), "true"));
        assert!(second.status.code() == Some(1), "{}", text(&second.stderr));
        assert!(text(&second.stderr).contains(remedy), "{}", text(&second.stderr));
        let first = first.wait_with_output().unwrap();
        assert_eq!(first.status.code(), Some(1));
        let said = text(&first.stderr);
        assert!(
            said.contains("was not let into the store") && said.contains("same --job-key-file"),
            "{said}"
        );
    }
}

#[test]
fn a_job_on_several_nodes_without_a_key_is_warned_of() {
    let port = free_port();
    // That of another job does not leak into this one's workers.
    let script = "test -z \"$PHALANX_JOB_KEY_FILE\"";
    let nodes = ["0", "1"].map(|rank| spawned(node(rank, &port, &[], script)));
    for child in nodes {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        let said = text(&output.stderr);
        assert!(said.contains("warning: this job has no key") && said.contains("phalanx keygen"), "{said}");
    }
}

#[test]
fn a_key_file_that_is_no_secret_is_refused_before_anything_starts() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("job.key");
    assert!(keygen(&path).status.success());
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    for by_variable in [true, false] {
        let mut command = bare();
        if by_variable {
            command.env("PHALANX_JOB_KEY_FILE", &path);
        } else {
            command.arg("--job-key-file").arg(&path);
        }
        command.args(["--", "echo", "never"]).stdout(Stdio::piped());
        let output = output(command);
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0));
        assert!(text(&output.stderr).contains("chmod 600"), "{}", text(&output.stderr));
    }
}
