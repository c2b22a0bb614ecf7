//! What is ended with a job, and by which signals.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::support::{
    LIMIT, exit_code, is_gone, output, phalanx, send, start, text, wait_until_gone, within,
};

#[test]
fn what_a_worker_leaves_behind_is_ended() {
    // One ends when asked, one only when killed.
    let folder = tempfile::tempdir().unwrap();
    let script = "sh -c 'echo $$; touch a; exec sleep 60' & \
                  sh -c 'trap \"\" TERM; echo $$; touch b; while :; do sleep 1; done' & \
                  until [ -e a ] && [ -e b ]; do sleep 0.05; done; sleep 0.3";
    let started = Instant::now();
    let mut command = phalanx(&["--grace-period", "0.3"], script);
    command.current_dir(folder.path());
    let output = output(command);
    assert_eq!(output.status.code(), Some(0));
    let pids: Vec<String> =
        text(&output.stdout).lines().map(|line| line["[0] ".len()..].to_owned()).collect();
    assert_eq!(pids.len(), 2);
    assert!(started.elapsed() >= Duration::from_millis(600));
    assert!(pids.iter().all(|pid| is_gone(pid)));
}

/// Starts what leaves the worker's process group, and prints their numbers: in a session of its own; the same with a parent
/// that ends at once, as daemons do; the same deaf to SIGTERM.
const DAEMONS: &str = "setsid sh -c 'echo $$; touch a; exec sleep 60' & \
                       (setsid sh -c 'echo $$; touch b; exec sleep 60' &); \
                       (setsid sh -c 'trap \"\" TERM; echo $$; touch c; while :; do sleep 1; done' &); ";

#[test]
fn what_a_worker_puts_into_a_session_of_its_own_is_ended_however_it_ends() {
    for code in [0, 3] {
        // One of them has no trace of the job in its environment.
        let folder = tempfile::tempdir().unwrap();
        let script = format!(
            "{DAEMONS} (env -i PATH=\"$PATH\" setsid sh -c 'echo $$; touch d; exec sleep 60' &); \
             until [ -e a ] && [ -e b ] && [ -e c ] && [ -e d ]; do sleep 0.05; done; exit {code}"
        );
        let mut command = phalanx(&["--grace-period", "0.3"], &script);
        command.current_dir(folder.path());
        let output = output(command);
        assert_eq!(output.status.code(), Some(code));
        // No worker runs any more.
        let err = text(&output.stderr);
        assert!(
            ["SIGTERM", "SIGKILL"].iter().all(|name| err.contains(&format!("sent {name} to the job's"))),
            "{err}"
        );
        assert!(!err.contains("to the workers"), "{err}");
        let pids: Vec<String> =
            text(&output.stdout).lines().map(|line| line["[0] ".len()..].to_owned()).collect();
        assert_eq!(pids.len(), 4, "{pids:?}");
        assert!(pids.iter().all(|pid| is_gone(pid)), "{pids:?}");
    }
}

#[test]
fn a_launcher_that_cannot_look_ends_what_a_worker_has_left_all_the_same() {
    // From now on it can open nothing: its first eight descriptors are taken. `poll` would refuse more than the limit.
    let folder = tempfile::tempdir().unwrap();
    let script = "setsid sh -c 'echo $$; touch a; exec sleep 60' & until [ -e a ]; do sleep 0.05; done; \
                  prlimit --pid $PPID --nofile=8:8";
    let mut command = phalanx(&["--grace-period", "0.3"], script);
    command.current_dir(folder.path());
    let output = output(command);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{err}");
    assert!(is_gone(out.strip_prefix("[0] ").unwrap().trim()), "{out}{err}");
}

/// The first process of a container calls `before`, and then executes `command` in its own place.
fn first_process(before: &str, command: &Command) -> Command {
    let mut outer = Command::new("unshare");
    outer.args(["--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c"]);
    outer.arg(format!("{before}\nexec \"$@\"")).arg("sh");
    within(outer, command)
}

/// There, everybody who loses his parent becomes a child of the launcher, also what `docker exec` has started.
#[test]
#[ignore = "needs root, which can make a PID namespace: .ci/full runs it"]
fn the_first_process_of_a_container_ends_nothing_without_the_jobs_tag() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = "setsid sh -c 'trap \"touch $1; exit\" TERM; touch $1.up; while :; do sleep 0.1; done' sh";
    let script = format!(
        "cd {} && ({daemon} ours &); (env -i PATH=\"$PATH\" {daemon} strange &); \
         until [ -e ours.up ] && [ -e strange.up ]; do sleep 0.05; done; echo $PPID",
        folder.path().display()
    );
    let outer = first_process(":", &phalanx(&[], &script));
    let started = Instant::now();
    let output = output(outer);
    assert_eq!(text(&output.stdout), "[0] 1\n", "{}", text(&output.stderr));
    let told = ["ours", "strange"].map(|name| folder.path().join(name).exists());
    assert!(told == [true, false] && started.elapsed() < LIMIT, "{told:?} {:?}", started.elapsed());
}

/// A script that starts a service and then executes the launcher leaves that child to it.
#[test]
#[ignore = "needs root, which can make a PID namespace: .ci/full runs it"]
fn the_first_process_of_a_container_reaps_orphans_although_it_has_a_child() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!(
        "cd {} && (sh -c 'echo $$ > orphan' &); \
         until [ -s orphan ] && [ ! -e /proc/$(cat orphan) ]; do sleep 0.05; done; echo reaped",
        folder.path().display()
    );
    let output = output(first_process("sleep 600 &", &phalanx(&[], &script)));
    assert_eq!(text(&output.stdout), "[0] reaped\n", "{}", text(&output.stderr));
}

#[test]
fn what_a_worker_puts_into_a_session_of_its_own_is_ended_with_the_launcher() {
    for signal in [Signal::TERM, Signal::KILL] {
        let folder = tempfile::tempdir().unwrap();
        let mut command = phalanx(&["--grace-period", "0.3"], &format!("{DAEMONS} sleep 60"));
        command.current_dir(folder.path());
        let (mut child, _out, pids) = start(command, 3);
        send(&child, signal);
        child.wait().unwrap();
        wait_until_gone(&pids);
    }
}

#[test]
fn a_stopped_worker_is_ended_too() {
    let script = "if [ $RANK = 1 ]; then sleep 0.2; exit 3; fi; kill -STOP $$; sleep 60";
    let started = Instant::now();
    assert_eq!(output(phalanx(&["--nproc-per-node", "2"], script)).status.code(), Some(3));
    // Long before SIGTERM and the grace period would be over for it.
    assert!(started.elapsed() < Duration::from_secs(25));
}

#[test]
fn signals_are_passed_on() {
    let all = [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129), (Signal::QUIT, 131)];
    for (signal, code) in all {
        let script = "trap 'echo caught INT; exit 0' INT; trap 'echo caught TERM; exit 0' TERM; \
                      trap 'echo caught HUP; exit 0' HUP; trap 'echo caught QUIT; exit 0' QUIT; \
                      sh -c 'echo $$; exec sleep 60' & echo $$; while :; do sleep 0.1; done";
        let (mut child, mut out, pids) = start(phalanx(&["--nproc-per-node", "2"], script), 4);
        send(&child, signal);
        let mut rest = String::new();
        out.read_to_string(&mut rest).unwrap();
        assert_eq!(exit_code(&mut child), Some(code));
        assert_eq!(rest.matches("caught").count(), 2, "{rest}");
        assert!(pids.iter().all(|pid| is_gone(pid)), "{pids:?}");
    }
}

#[test]
fn a_users_signal_reaches_the_workers_and_ends_nothing() {
    let script = "trap 'echo saved 1; exit 0' USR1; trap 'echo saved 2; exit 0' USR2; \
                  echo $$; while :; do sleep 0.05; done";
    for (signal, said) in [(Signal::USR1, "saved 1"), (Signal::USR2, "saved 2")] {
        let (mut child, mut out, _) = start(phalanx(&["--nproc-per-node", "2"], script), 2);
        send(&child, signal);
        let mut rest = String::new();
        out.read_to_string(&mut rest).unwrap();
        assert_eq!((rest.matches(said).count(), exit_code(&mut child)), (2, Some(0)), "{rest}");
    }
}

#[test]
fn who_does_not_end_in_time_is_killed() {
    let script = "trap '' TERM; echo $$; while :; do sleep 1; done";
    let (mut child, _out, pids) = start(phalanx(&["--grace-period", "0.3"], script), 1);
    let started = Instant::now();
    send(&child, Signal::TERM);
    assert_eq!(exit_code(&mut child), Some(143));
    assert!(started.elapsed() >= Duration::from_millis(300) && is_gone(&pids[0]));
}

#[test]
fn a_second_ctrl_c_kills_at_once() {
    let script = "trap '' INT TERM; echo $$; while :; do sleep 1; done";
    let (mut child, _out, pids) = start(phalanx(&[], script), 1);
    let mut err = BufReader::new(child.stderr.take().unwrap());
    send(&child, Signal::INT);
    let mut line = String::new();
    err.read_line(&mut line).unwrap();
    assert!(line.contains("Ctrl-C again"), "{line}");
    let started = Instant::now();
    send(&child, Signal::INT);
    assert_eq!(exit_code(&mut child), Some(130));
    // Not after the grace period of 30 s.
    assert!(started.elapsed() < Duration::from_secs(25) && is_gone(&pids[0]));
}

/// After a program that has ended with a code, a shell goes on with its script.
#[test]
fn ctrl_c_ends_the_launcher_by_its_own_signal() {
    let (mut child, _out, pids) = start(phalanx(&[], "echo $$; exec sleep 60"), 1);
    send(&child, Signal::INT);
    assert_eq!(child.wait().unwrap().signal(), Some(Signal::INT.as_raw()));
    assert!(is_gone(&pids[0]));
}

/// What reads from a terminal in the background is stopped, without a word. PBS knows what belongs to a job by its session.
#[test]
fn a_worker_has_no_terminal_and_stays_in_the_session_of_its_launcher() {
    let looks =
        "cut -d ' ' -f 6,7 /proc/$PPID/stat /proc/$$/stat; (: < /dev/tty) 2> /dev/null || echo refused";
    let launcher = phalanx(&[], looks);
    let words = std::iter::once(launcher.get_program()).chain(launcher.get_args());
    let quoted = words.map(|word| format!("'{}'", word.to_string_lossy().replace('\'', r"'\''")));
    // It makes a session with a terminal, on which a launcher in colour would write more than these lines.
    let mut command = Command::new("script");
    command.args(["-qec", &format!("exec {}", quoted.collect::<Vec<_>>().join(" ")), "/dev/null"]);
    launcher.get_envs().for_each(|(name, _)| {
        command.env_remove(name);
    });
    command.env("SHELL", "/bin/sh").env("TERM", "dumb");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let out = text(&output(command).stdout);
    let lines: Vec<&str> = out.lines().filter_map(|line| line.strip_prefix("[0] ")).collect();
    let [of_launcher, of_worker, "refused"] = lines[..] else { panic!("{out}") };
    let (session, terminal) = of_launcher.split_once(' ').unwrap();
    assert!(terminal != "0" && of_worker == format!("{session} 0"), "{out}");
}

#[test]
fn the_launchers_own_death_ends_all() {
    let script = "trap '' TERM HUP INT; sh -c 'echo $$; exec sleep 60' & echo $$; wait";
    let (mut child, _out, pids) = start(phalanx(&["--nproc-per-node", "2"], script), 4);
    send(&child, Signal::KILL);
    child.wait().unwrap();
    wait_until_gone(&pids);
}
