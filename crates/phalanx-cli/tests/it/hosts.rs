//! `phalanx run -H`: one command starts launchers on several hosts. A script stands in for ssh, and runs what it is told
//! to on this machine, as a login of its own would: in a session of its own, elsewhere, with next to no environment.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::process::{Child, Output};

use rustix::process::{Pid, Signal};

use crate::support::stand_in::Hosts;
use crate::support::{SUM, bare, exit_code, limit, output, send, sorted_lines, start, text, wait_until_gone};

#[test]
fn a_reader_that_pauses_gets_everything() {
    let hosts = Hosts::new();
    let lines = 60_000;
    let flood = format!(
        "i=0; while [ $i -lt {lines} ]; do echo a line of a worker that has a lot to say, $i of them so far and more to come; i=$((i+1)); done"
    );
    let mut child = hosts.script("one:1,two:1", &[], &flood).spawn().unwrap();
    limit(&child);
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut read = 0;
    let mut line = Vec::new();
    for pause in [100, 300, 2000] {
        for _ in 0..100 {
            line.clear();
            read += usize::from(out.read_until(b'\n', &mut line).unwrap() > 0);
        }
        // Pipes and queues fill meanwhile.
        std::thread::sleep(std::time::Duration::from_millis(pause));
    }
    let mut rest = Vec::new();
    out.read_to_end(&mut rest).unwrap();
    read += rest.iter().filter(|byte| **byte == b'\n').count();
    assert_eq!((exit_code(&mut child), read), (Some(0), 2 * lines));
}

/// For longer than a launcher's last words take otherwise, and with more than pipes hold.
#[test]
fn a_reader_that_pauses_when_the_job_ends_gets_everything() {
    let hosts = Hosts::new();
    let lines = 9_000;
    let flood = format!(
        "i=0; while [ $i -lt {lines} ]; do echo a line of a worker that has a lot to say before it ends, which is line $i of {lines} and no other one; i=$((i+1)); done"
    );
    let mut child = hosts.script("one:1,two:1", &[], &flood).spawn().unwrap();
    limit(&child);
    std::thread::sleep(std::time::Duration::from_secs(12));
    let mut out = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut out).unwrap();
    let read = out.iter().filter(|byte| **byte == b'\n').count();
    assert_eq!((exit_code(&mut child), read), (Some(0), 2 * lines));
}

#[test]
fn a_reader_that_does_not_read_holds_up_no_signal() {
    let hosts = Hosts::new();
    let flood = "echo up $$; while :; do echo a line; done";
    let (mut child, _unread, pids) = start(hosts.script("one:1,two:1", &[], flood), 1);
    // Pipes and queues fill meanwhile.
    std::thread::sleep(std::time::Duration::from_millis(300));
    send(&child, Signal::TERM);
    assert_eq!(exit_code(&mut child), Some(143));
    wait_until_gone(&pids);
}

/// The second worker fails when the first one, whose lines nobody reads, gets no further; then all are read.
#[test]
fn a_reader_that_does_not_read_holds_up_no_replacement() {
    let hosts = Hosts::new();
    let lines = 60_000;
    let flood = format!(
        "[ $RANK = 0 ] && {{ i=0; while [ $i -lt {lines} ]; do echo a line of a worker that has a lot to say, $i of them so far and more to come; \
         i=$((i+1)); [ $((i % 100)) = 0 ] && echo $i > count; done; exit 0; }}; [ -e failed ] && {{ : > replaced; exit 0; }}; \
         seen=; until now=$(cat count 2> /dev/null) && [ -n \"$now\" ] && [ \"$now\" = \"$seen\" ]; do seen=$now; sleep 0.3; done; : > failed; exit 3"
    );
    let options = ["--min-np", "1", "--max-restarts", "1"];
    let mut child = hosts.script("far1:1,far2:1", &options, &flood).spawn().unwrap();
    limit(&child);
    let replaced = hosts.path().join("replaced");
    while !replaced.exists() {
        assert!(child.try_wait().unwrap().is_none(), "it has ended: {}", err(&mut child));
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let mut out = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut out).unwrap();
    let read = out.iter().filter(|byte| **byte == b'\n').count();
    assert_eq!((exit_code(&mut child), read), (Some(0), lines));
}

/// Each worker gets its rank on its own host, right behind the program, on every host.
#[test]
fn launch_on_several_hosts_passes_the_local_rank() {
    let script = "echo $RANK $LOCAL_RANK $@";
    for (options, option) in [(&[][..], "--local-rank"), (&["--local_rank_underscore"], "--local_rank")] {
        let hosts = Hosts::new();
        let output = output(hosts.launch("localhost:1,far:2", options, script, &["--lr", "1"]));
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{err}");
        let line = |rank, local| format!("[{rank}] {rank} {local} {option}={local} --lr 1");
        assert_eq!(sorted_lines(&output.stdout), [line(0, 0), line(1, 0), line(2, 1)], "{err}");
    }
    let hosts = Hosts::new();
    let output = output(hosts.launch("localhost:1,far:1", &["--use-env"], script, &["x"]));
    assert_eq!(sorted_lines(&output.stdout), ["[0] 0 0 x", "[1] 1 0 x"], "{}", text(&output.stderr));
}

fn err(child: &mut Child) -> String {
    let mut text = String::new();
    child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    text
}

fn assert_refused(output: &Output, code: i32, expected: &[&str]) {
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{err}");
    for expected in expected {
        assert!(err.contains(expected), "no {expected:?} in {err}");
    }
}

#[test]
fn ranks_fill_the_hosts_in_order_and_all_speak_here() {
    let hosts = Hosts::new();
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE $HOST_OF_TEST; echo to-stderr >&2";
    let output = output(hosts.script("localhost:2,far1:2,far2:2", &["-np", "5"], script));
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{err}");
    assert_eq!(
        sorted_lines(&output.stdout),
        [
            "[0] 0/5 0/2 0/3",
            "[1] 1/5 1/2 0/3",
            "[2] 2/5 0/2 1/3 far1",
            "[3] 3/5 1/2 1/3 far1",
            "[4] 4/5 0/1 2/3 far2"
        ]
    );
    assert_eq!(err.matches("to-stderr").count(), 5, "{err}");
    assert!(!err.contains("Welcome"), "{err}");
}

#[test]
fn a_file_names_the_hosts_and_a_group_spans_them() {
    let hosts = Hosts::new();
    std::fs::write(hosts.path().join("hosts"), "# two\nfar1 slots=2\nlocalhost:1\n").unwrap();
    let mut command = bare();
    command.env("PHALANX_RSH", hosts.path().join("rsh")).current_dir(hosts.path());
    command.args(["--hostfile", "hosts", "--master-addr", "127.0.0.1", "--", "sh", "-c", SUM]);
    let output = output(command);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}

#[test]
fn arguments_environment_and_folder_arrive_whole_and_nothing_of_them_is_on_a_command_line() {
    let hosts = Hosts::new();
    let odd = ["", "a b", "'", "$HOME `id` $(id)", "\\", "\"", "*", "new\nline", "-H", "!", "ü\u{1f600}"];
    let mut command = hosts.run("far1:1", &["--"]);
    command.env("PHALANX_TEST_SECRET", "do not tell; it's $ecret").args(["sh", "-c"]);
    command
        .arg("pwd; printenv PWD; echo \"$PHALANX_TEST_SECRET\"; printf '%s\\0' \"$@\" > arguments")
        .arg("sh");
    command.args(odd).arg(OsStr::from_bytes(b"\xff\x01"));
    let output = output(command);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let folder = hosts.path().canonicalize().unwrap();
    let expected = format!("[0] {0}\n[0] {0}\n[0] do not tell; it's $ecret\n", folder.display());
    assert_eq!(text(&output.stdout), expected);
    let arguments: Vec<u8> =
        odd.iter().flat_map(|word| word.bytes().chain([0])).chain(*b"\xff\x01\0").collect();
    assert_eq!(std::fs::read(hosts.path().join("arguments")).unwrap(), arguments);
    let calls = std::fs::read_to_string(hosts.path().join("calls")).unwrap();
    assert!(calls.contains("BatchMode=yes") && !calls.contains("ecret"), "{calls}");
}

#[test]
fn a_folder_whose_name_is_not_utf_8_is_that_of_all_hosts_and_each_names_its_logs() {
    let hosts = Hosts::new();
    let folder = hosts.path().canonicalize().unwrap().join(OsStr::from_bytes(b"odd \xff"));
    std::fs::create_dir(&folder).unwrap();
    let mut command = hosts.script("far1:1,far2:1", &["--tee", "1", "--log-dir", "logs"], "pwd");
    command.current_dir(&folder);
    let output = output(command);
    let (err, folder) = (text(&output.stderr), folder.display());
    assert_eq!(output.status.code(), Some(0), "{err}");
    assert_eq!(sorted_lines(&output.stdout), [format!("[0] {folder}"), format!("[1] {folder}")], "{err}");
    for host in ["far1", "far2"] {
        assert!(err.contains(&format!("logs are kept in {host}:{folder}/logs/")), "{err}");
    }
}

#[test]
fn the_first_failure_is_shown_once_wherever_it_was() {
    let hosts = Hosts::new();
    let script = "[ $RANK = 2 ] || exec sleep 60; echo the reason >&2; exit 9";
    let output = output(hosts.script("localhost:1,far1:2", &[], script));
    assert_refused(&output, 9, &["2 of 3", "(node 1 of 2)", "exit code 9", "the reason"]);
    assert_eq!(text(&output.stderr).matches("The first failure").count(), 1);
}

#[test]
fn restarts_happen_on_all_hosts() {
    let hosts = Hosts::new();
    // Rank 1 fails when rank 0 has said something: whoever still starts then is ended without a word.
    let script = "echo $TORCHELASTIC_RESTART_COUNT; [ $TORCHELASTIC_RESTART_COUNT = 0 ] || exit 0; \
                  [ $RANK = 1 ] || { : > said; exit 0; }; until [ -e said ]; do sleep 0.01; done; exit 7";
    let output = output(hosts.script("localhost,far1", &["--max-restarts", "1"], script));
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{err}");
    assert_eq!(sorted_lines(&output.stdout), ["[0] 0", "[0] 1", "[1] 0", "[1] 1"]);
    assert_eq!(err.matches("restart 1 of 1").count(), 1, "{err}");
}

#[test]
fn signals_end_all_hosts() {
    let all = [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129), (Signal::QUIT, 131)];
    for (signal, code) in all {
        let hosts = Hosts::new();
        let (mut child, _out, pids) =
            start(hosts.script("localhost:1,far1:2", &[], "echo up $$; exec sleep 60"), 3);
        send(&child, signal);
        assert_eq!(exit_code(&mut child), Some(code));
        wait_until_gone(&pids);
    }
}

/// Of a person who does not want to wait until the other workers have ended.
#[test]
fn ctrl_c_after_the_first_failure_does_not_hide_it() {
    let hosts = Hosts::new();
    let script = "[ $RANK = 0 ] || { until [ -e up ]; do sleep 0.01; done; echo the reason >&2; exit 7; }; \
                  trap '' TERM; : > up; while :; do sleep 1; done";
    let mut child = hosts.script("localhost:1,far1:1", &[], script).spawn().unwrap();
    limit(&child);
    let mut err = BufReader::new(child.stderr.take().unwrap());
    let mut said = String::new();
    while !said.contains("sent SIGTERM to the job's processes that still run") {
        assert!(err.read_line(&mut said).unwrap() > 0, "{said}");
    }
    send(&child, Signal::INT);
    err.read_to_string(&mut said).unwrap();
    assert_eq!(exit_code(&mut child), Some(7), "{said}");
    assert!(said.contains("The first failure") && said.contains("stderr  the reason"), "{said}");
}

#[test]
fn a_users_signal_reaches_the_workers_of_all_hosts_and_ends_nothing() {
    let script = "trap 'echo saved 1; exit 0' USR1; trap 'echo saved 2; exit 0' USR2; \
                  echo up $$; while :; do sleep 0.05; done";
    for (signal, said) in [(Signal::USR1, "saved 1"), (Signal::USR2, "saved 2")] {
        let hosts = Hosts::new();
        let (mut child, mut out, _) = start(hosts.script("localhost:1,far1:2", &[], script), 3);
        send(&child, signal);
        let mut rest = String::new();
        out.read_to_string(&mut rest).unwrap();
        assert_eq!((rest.matches(said).count(), exit_code(&mut child)), (3, Some(0)), "{rest}");
    }
}

#[test]
fn without_the_command_nothing_stays_on_any_host() {
    let hosts = Hosts::new();
    let (mut child, _out, pids) =
        start(hosts.script("localhost:1,far1:2", &[], "echo up $$; exec sleep 60"), 3);
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until_gone(&pids);
}

#[test]
fn a_broken_connection_is_a_lost_host() {
    let hosts = Hosts::new();
    let (mut child, _out, pids) =
        start(hosts.script("localhost:1,far1:1", &[], "echo up $$; exec sleep 60"), 2);
    let shell: i32 = std::fs::read_to_string(hosts.path().join("far1.pid")).unwrap().trim().parse().unwrap();
    rustix::process::kill_process(Pid::from_raw(shell).unwrap(), Signal::KILL).unwrap();
    assert_eq!(exit_code(&mut child), Some(1));
    let err = err(&mut child);
    assert!(err.contains("far1: the connection to its launcher is lost"), "{err}");
    wait_until_gone(&pids);
}

#[test]
fn what_is_wrong_with_a_host_is_said_with_its_name() {
    let hosts = Hosts::new();
    let refused = |names: &str, options: &[&str], expected: &[&str]| {
        let output = output(hosts.script(names, options, "echo never"));
        assert_refused(&output, 1, expected);
        assert_eq!(text(&output.stdout), "");
    };
    refused("localhost,bad-name", &[], &["bad-name: there is no host of this name"]);
    refused("far1,bad-key", &[], &["bad-key: it accepts none of the keys", "ssh-copy-id bad-key"]);
    refused("bad-path", &[], &["bad-path: there is no phalanx", "install the same version"]);
    refused("bad-version", &[], &["bad-version has Phalanx 0.0.9", "install the same version"]);
    refused("localhost,bad-silence", &["--start-timeout", "5"], &["bad-silence has not answered within 5"]);
    let many = output(hosts.script("far1:2", &["-np", "3"], "echo never"));
    assert_refused(&many, 2, &["3 workers, but the hosts have 2 slots"]);
}

#[test]
fn a_host_that_turns_connections_away_is_tried_again_for_a_while() {
    let hosts = Hosts::new();
    let tries = |host: &str| {
        std::fs::read_to_string(hosts.path().join(format!("{host}.tries"))).unwrap().lines().count()
    };
    // The first one is node 0, whose place it keeps.
    let shown =
        output(hosts.script("full1,localhost,full2:2", &[], "echo $RANK of $WORLD_SIZE on $HOST_OF_TEST"));
    let err = text(&shown.stderr);
    assert_eq!(shown.status.code(), Some(0), "{err}");
    let lines = ["[0] 0 of 4 on full1", "[1] 1 of 4 on", "[2] 2 of 4 on full2", "[3] 3 of 4 on full2"];
    let said = sorted_lines(&shown.stdout);
    assert!(said.iter().map(|line| line.trim_end()).eq(lines), "{said:?}");
    assert_eq!((tries("full1"), tries("full2")), (3, 3));
    assert_eq!(err.matches("raise MaxStartups").count(), 1, "{err}");

    let refused = output(hosts.script("localhost,bad-full", &["--start-timeout", "4"], "echo never"));
    assert_refused(
        &refused,
        1,
        &["bad-full: it closes the connection before ssh begins", "raise MaxStartups"],
    );
    assert!((2..=4).contains(&tries("bad-full")), "{}", tries("bad-full"));
}

#[test]
fn a_program_or_a_folder_that_a_host_lacks_is_named_with_the_host() {
    let hosts = Hosts::new();
    let mut command = hosts.run("localhost,far1", &[]);
    command.args(["--", "./missing"]);
    assert_refused(&output(command), 127, &["cannot start ./missing as rank"]);

    std::fs::create_dir(hosts.path().join("work")).unwrap();
    let mut command = hosts.run("bad-folder", &["--", "true"]);
    command.current_dir(hosts.path().join("work"));
    assert_refused(&output(command), 1, &["bad-folder: cannot work in", "all hosts need the folder"]);
}
