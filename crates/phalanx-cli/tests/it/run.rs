//! `phalanx run` with real programs.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;

use crate::environment;
use crate::support::{
    bare, command, exit_code, free_port, is_gone, limit, node, output, phalanx, send, sorted_lines, start,
    text, wait_until_gone, within, write_program,
};

#[test]
fn lines_carry_their_rank_and_stay_on_their_stream() {
    let script = "echo out $LOCAL_RANK; echo err $RANK of $WORLD_SIZE >&2";
    let output = output(phalanx(&["--nproc-per-node", "3"], script));
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(sorted_lines(&output.stdout), ["[0] out 0", "[1] out 1", "[2] out 2"]);
    let said = sorted_lines(&output.stderr);
    assert_eq!(said[..3], ["[0] err 0 of 3", "[1] err 1 of 3", "[2] err 2 of 3"]);
    // Of what is set silently otherwise.
    assert!(
        said[3].contains("OMP_NUM_THREADS and RAYON_NUM_THREADS are set to 1") && said.len() == 4,
        "{said:?}"
    );
}

#[test]
fn launch_passes_the_local_rank_as_an_option() {
    let folder = tempfile::tempdir().unwrap();
    let script = |name: &str| {
        let path = folder.path().join(name);
        write_program(&path, "#!/bin/sh\necho \"$LOCAL_RANK: $*\"\n", 0o755);
        path
    };
    let (program, python) = (script("train"), script("python3"));
    let launch = |options: &[&str], program: &Path| {
        let mut command = command("launch");
        command.args(options).arg(program).args(["--lr", "1"]);
        command.env("PYTHON_EXEC", &python).env("PET_NNODES", "");
        let output = output(command);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        sorted_lines(&output.stdout)
    };
    let said = launch(&["--nproc_per_node=2"], &program);
    assert_eq!(said, ["[0] 0: --local-rank=0 --lr 1", "[1] 1: --local-rank=1 --lr 1"]);
    assert_eq!(launch(&["--local-rank-underscore"], &program), ["[0] 0: --local_rank=0 --lr 1"]);
    assert_eq!(launch(&["--use-env"], &program), ["[0] 0: --lr 1"]);
    assert_eq!(launch(&[], Path::new("train.py")), ["[0] 0: -u train.py --local-rank=0 --lr 1"]);
}

#[test]
fn a_list_of_hosts_with_blanks_starts_none_of_them() {
    let mut command = bare();
    command.args(["-H", "localhost:1,", "b:1", "--", "true"]);
    let output = output(command);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("b:1 was taken for the program"), "{}", text(&output.stderr));
}

#[test]
fn horovods_build_is_checked_without_a_program() {
    let mut command = command("horovodrun");
    command.arg("--check-build");
    let output = output(command);
    assert!(output.status.success() && text(&output.stdout).contains("[X] shared memory"), "{output:?}");
}

#[test]
fn lines_never_mix_and_none_is_lost() {
    let script = "i=0; while [ $i -lt 2000 ]; do printf %s a$RANK; echo b$RANK$RANK; i=$((i+1)); done";
    let lines = sorted_lines(&output(phalanx(&["--nproc-per-node", "4"], script)).stdout);
    assert_eq!(lines.len(), 8000);
    for rank in 0..4 {
        let line = format!("[{rank}] a{rank}b{rank}{rank}");
        assert_eq!(lines.iter().filter(|other| **other == line).count(), 2000);
    }
}

#[test]
fn bytes_long_lines_and_progress_bars_pass() {
    let script = r"printf 'a\377b\n'; head -c 100000 /dev/zero | tr '\0' x; echo; printf '\r1%%\r2%%\r3%%\n'; printf end";
    let output = output(phalanx(&[], script));
    let lines: Vec<&[u8]> = output.stdout.split(|byte| *byte == b'\n').collect();
    assert_eq!(lines[0], b"[0] a\xffb");
    assert!(lines[1].ends_with(b"x [the line goes on]"));
    assert_eq!([lines[1].len(), lines[2].len()], [4 + 65536 + 19, 4 + 100_000 - 65536]);
    assert_eq!(lines[3..], [&b"[0] 1%"[..], b"[0] 3%", b"[0] end", b""]);
}

#[test]
fn the_environment_is_torchruns() {
    let mut command = phalanx(&["--role", "trainer"], "env; cat");
    command.env("PET_NPROC_PER_NODE", "2").env("OMP_NUM_THREADS", "5");
    let lines = sorted_lines(&output(command).stdout);
    for expected in [
        "RANK=1",
        "LOCAL_RANK=1",
        "WORLD_SIZE=2",
        "LOCAL_WORLD_SIZE=2",
        "GROUP_RANK=0",
        "GROUP_WORLD_SIZE=1",
        "ROLE_RANK=1",
        "ROLE_NAME=trainer",
        "ROLE_WORLD_SIZE=2",
        "MASTER_ADDR=127.0.0.1",
        "TORCHELASTIC_RESTART_COUNT=0",
        "TORCHELASTIC_MAX_RESTARTS=0",
        "TORCHELASTIC_USE_AGENT_STORE=True",
        "OMP_NUM_THREADS=5",
        "RAYON_NUM_THREADS=1",
    ] {
        assert!(lines.contains(&format!("[1] {expected}")), "{expected} is not in {lines:#?}");
    }
    for name in ["MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"] {
        let start = format!("[0] {name}=");
        assert!(lines.iter().any(|line| line.starts_with(&start) && line.len() > start.len()), "{name}");
    }
}

#[test]
fn a_store_listens_at_the_master_address() {
    let script = "echo $MASTER_ADDR; echo $MASTER_PORT; exec sleep 60";
    let mut child = phalanx(&["--master-addr", "localhost"], script).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().take(2);
    let lines: Vec<String> = lines.map(|line| line.unwrap()["[0] ".len()..].to_owned()).collect();
    let port: u16 = lines[1].parse().unwrap();
    let connection = TcpStream::connect((lines[0].as_str(), port));
    let taken = output(phalanx(&["--master-port", &lines[1]], "echo never"));
    send(&child, Signal::TERM);
    assert_eq!(exit_code(&mut child), Some(143));

    assert_eq!(lines[0], "localhost");
    connection.unwrap();
    assert_eq!(taken.status.code(), Some(1));
    assert!(taken.stdout.is_empty() && text(&taken.stderr).contains(&lines[1]), "{}", text(&taken.stderr));
}

#[test]
fn the_first_failure_is_the_commands_and_is_shown_last() {
    let script = "if [ $RANK = 1 ]; then echo first line >&2; echo the reason >&2; exit 3; fi; sleep 60";
    let output = output(phalanx(&["--nproc-per-node", "3"], script));
    assert_eq!(output.status.code(), Some(3));
    let err = text(&output.stderr);
    let (_, report) = err.split_once("The first failure").unwrap();
    for expected in
        ["rank    1 of 3", "host    ", "pid     ", "exit code 3", "stderr  first line", "the reason"]
    {
        assert!(report.contains(expected), "{expected} is not in {err}");
    }
    assert!(err.trim_end().ends_with('─'));
}

#[test]
fn a_message_in_the_error_file_is_shown() {
    let script = r#"echo '{"message": "the data are torn"}' > $TORCHELASTIC_ERROR_FILE; exit 1"#;
    let err = text(&output(phalanx(&[], script)).stderr);
    assert!(err.contains("error   the data are torn"), "{err}");
}

#[test]
fn a_signal_is_named_and_its_code_is_a_shells() {
    let output = output(phalanx(&["--nproc-per-node", "2"], "[ $RANK = 0 ] || kill -SEGV $$; sleep 60"));
    assert_eq!(output.status.code(), Some(128 + 11));
    assert!(text(&output.stderr).contains("killed by SIGSEGV"));
}

#[test]
fn early_success_waits_for_the_others() {
    let output = output(phalanx(&["--nproc-per-node", "2"], "[ $RANK = 0 ] || { sleep 0.3; echo late; }"));
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(0), "[1] late\n"));
}

#[test]
fn a_limit_of_the_system_is_named() {
    // Of descriptors: too few for the store, the guard and the worker.
    for limit in [8, 14, 20] {
        let mut shell = bare();
        shell.args(["--nproc-per-node", "4", "--", "true"]);
        let output = output(limited(&shell, "", limit));
        assert_eq!(output.status.code(), Some(1), "{limit}");
        assert!(text(&output.stderr).contains("raise `ulimit -n`"), "{limit}: {}", text(&output.stderr));
    }
}

/// A shell's usual limit is far below the hard one, and its workers would need more together.
#[test]
fn a_limit_of_descriptors_that_may_be_raised_is_no_obstacle() {
    let mut command = bare();
    command.args(["--nproc-per-node", "8", "--", "sh", "-c", "ulimit -n"]);
    let output = output(limited(&command, "-S", 40));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    // They have inherited what a rank needs.
    let said = text(&output.stdout);
    let limits: Vec<u32> = said.lines().map(|line| line["[0] ".len()..].parse().unwrap()).collect();
    assert!(limits.len() == 8 && limits.iter().all(|limit| *limit > 40), "{said}");
}

/// The store of all nodes' workers is served before it is known how many there are.
#[test]
fn the_limit_of_descriptors_is_raised_for_the_workers_of_other_nodes_too() {
    let port = free_port();
    let launcher = node("0", &port, &["--nproc-per-node", "8"], "true");
    let mut waiting = limited(&launcher, "-S", 40).spawn().unwrap();
    limit(&waiting);
    // It serves a store, and waits for the other node.
    while TcpStream::connect(format!("127.0.0.1:{port}")).is_err() {
        assert!(waiting.try_wait().unwrap().is_none(), "it has ended");
        std::thread::sleep(Duration::from_millis(5));
    }
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", waiting.id())).unwrap();
    let files = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    let soft: u64 = files.split_whitespace().next().unwrap().parse().unwrap();
    // 6 for each of its own workers, 3 for each rank of both nodes.
    assert!(soft >= 8 * 6 + 16 * 3, "{limits}");
    waiting.kill().unwrap();
    waiting.wait().unwrap();
}

/// The same command, with so few descriptors; `-S` limits them softly.
fn limited(command: &Command, kind: &str, descriptors: u32) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("ulimit {kind} -n {descriptors}; exec \"$0\" \"$@\"")]);
    within(shell, command)
}

#[test]
fn lines_are_shown_of_whom_and_behind_what_a_person_wants() {
    let options = ["--nproc-per-node", "3", "--local-ranks-filter", "0,2", "--role", "trainer"];
    let template = ["--log-line-prefix-template", "<${role_name}${local_rank}/${rank}> "];
    let output = output(phalanx(&[&options[..], &template].concat(), "echo hello; [ $RANK != 1 ] || exit 3"));
    assert_eq!(sorted_lines(&output.stdout), ["<trainer0/0> hello", "<trainer2/2> hello"]);
    assert_eq!(output.status.code(), Some(3));
}

#[test]
fn variables_say_what_is_shown_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = phalanx(&[], "echo $ROLE_NAME");
    command.env("PET_NPROC_PER_NODE", "3").env("PET_ROLE", "trainer").env("PET_LOCAL_RANKS_FILTER", "1");
    command.env("PET_LOG_DIR", folder.path()).env("PET_TEE", "0:1,2:1");
    command.env("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "<${rank}> ");
    let shown = output(command);
    assert_eq!(text(&shown.stdout), "<1> trainer\n", "{}", text(&shown.stderr));
    let jobs: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|job| job.unwrap().path()).collect();
    let [job] = &jobs[..] else { panic!("{jobs:?}") };
    let kept = |rank: u32| std::fs::read_to_string(job.join(format!("attempt_0/{rank}/stdout.log"))).ok();
    let line = Some("trainer\n".to_owned());
    assert_eq!([0, 1, 2].map(kept), [line.clone(), None, line]);

    let mut command = phalanx(&[], "echo hello");
    command.env("PHALANX_LOG_FORMAT", "json");
    let line: serde_json::Value = serde_json::from_slice(&output(command).stdout).unwrap();
    assert_eq!((&line["rank"], &line["text"]), (&0.into(), &"hello".into()));
}

#[test]
fn a_folder_for_logs_alone_stays_empty_and_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let logs = folder.path().join("logs");
    let output = output(phalanx(&["--log-dir", logs.to_str().unwrap()], "echo hello"));
    assert!(text(&output.stderr).contains("--tee 3") && !logs.exists(), "{}", text(&output.stderr));
}

#[test]
fn one_machine_is_one_machine_whatever_else_is_said() {
    let options = ["--standalone", "--rdzv-endpoint", "node7.invalid:1", "--rdzv-conf", "store_type=file"];
    let output = output(phalanx(&options, "echo $MASTER_ADDR"));
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(0), "[0] 127.0.0.1\n"));
    let err = text(&output.stderr);
    assert!(
        err.contains("--rdzv-endpoint has no effect") && err.contains("store_type has no effect"),
        "{err}"
    );
}

#[test]
fn a_program_that_cannot_be_started_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("a-script");
    std::fs::write(&script, "#!/no/such/interpreter\n").unwrap();
    let refused = |program: &Path, code| {
        let mut command = bare();
        command.args(["--nproc-per-node", "2"]).arg(program).current_dir(folder.path());
        let output = output(command);
        assert_eq!(output.status.code(), Some(code));
        text(&output.stderr)
    };
    assert!(refused(Path::new("no-such-program"), 127).contains("no-such-program as rank 0"));
    assert!(refused(Path::new("a-script"), 127).contains("write ./a-script"));
    assert!(refused(&script, 126).contains("chmod +x"));
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    assert!(refused(&script, 127).contains("interpreter"));
}

#[test]
fn a_reader_that_has_seen_enough_ends_the_job() {
    let mut child = phalanx(&["--nproc-per-node", "2"], "while :; do echo line; done").spawn().unwrap();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
    assert_eq!(exit_code(&mut child), Some(141));
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(said.contains("what read standard output has closed it"), "{said}");
    // Its workers have not failed.
    assert!(!said.contains("killed by"), "{said}");
}

/// As users have it: nobody has told the launcher, or the workers, to ignore SIGXFSZ.
#[test]
fn a_file_that_becomes_too_large_is_an_error_of_the_worker_and_not_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let large = folder.path().join("large");
    let script = format!("head -c 100000 /dev/zero > {}; echo $? $PYTHONUNBUFFERED", large.display());
    let mut shell = environment::command("sh");
    shell.args(["-c", "ulimit -f 8; exec \"$0\" run --nproc-per-node 1 -- sh -c \"$1\""]);
    shell.arg(env!("CARGO_BIN_EXE_phalanx")).arg(script).env_remove("PYTHONUNBUFFERED").env("LC_ALL", "C");
    let output = shell.stdin(Stdio::null()).output().unwrap();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success() && out.contains("1 1") && err.contains("File too large"), "{out}{err}");
}

#[test]
fn a_reader_that_does_not_read_holds_up_neither_signals_nor_the_end_of_a_failed_job() {
    let flood = "echo $$; while :; do echo a line; done";
    let (mut child, _unread, pids) = start(phalanx(&[], flood), 1);
    std::thread::sleep(Duration::from_millis(300));
    send(&child, Signal::TERM);
    assert_eq!(exit_code(&mut child), Some(143));
    assert!(is_gone(&pids[0]));

    let script = format!("[ $RANK = 0 ] || {{ sleep 3; echo why >&2; exit 3; }}; {flood}");
    let (mut child, mut out, pids) = start(phalanx(&["--nproc-per-node", "2"], &script), 1);
    wait_until_gone(&pids);
    // Whoever reads after all gets everything.
    out.read_to_end(&mut Vec::new()).unwrap();
    assert_eq!(exit_code(&mut child), Some(3));
    let mut err = String::new();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    assert!(err.contains("stderr  why"), "{err}");
}

/// As torchrun leaves it there.
#[test]
fn the_first_failure_is_in_the_error_file_that_the_command_was_given() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("error.json");
    let script = "[ $RANK = 0 ] && exec sleep 60; echo '{\"message\": \"no data\"}' > $TORCHELASTIC_ERROR_FILE; exit 3";
    let mut command = phalanx(&["--nproc-per-node", "2"], script);
    command.env("TORCHELASTIC_ERROR_FILE", &file);
    let output = output(command);
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
    let said: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let message = said["message"]["message"].as_str().unwrap();
    assert!(message.starts_with("rank 1 (pid ") && message.ends_with(": no data"), "{message}");
}

/// As torchrun leaves its own.
#[test]
fn an_error_of_the_command_itself_is_in_that_file_too() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("error.json");
    let mut command = bare();
    command.env("TORCHELASTIC_ERROR_FILE", &file).args(["--", "/nonexistent/program"]);
    let output = output(command);
    assert_eq!(output.status.code(), Some(127), "{}", text(&output.stderr));
    let said: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let message = said["message"]["message"].as_str().unwrap();
    assert!(message.contains("/nonexistent/program"), "{message}");
}

#[test]
fn options_are_checked() {
    for (options, expected) in [
        (&["--nproc-per-node", "0"][..], "give a number of workers from 1 to 65536"),
        (&["-np", "0"], "-np 0: give a number"),
        (&["--nproc-per-node", "-1"], "'-1' for '--nproc-per-node <N>'"),
        (&["--nproc-per-node", "many"], "neither a number"),
        (&["--grace-period=-1"], "grace-period"),
        (&["--nproc-per-nod", "2"], "'--nproc-per-node'"),
        // With torchrun the last one counts.
        (&["--nproc-per-node", "2", "--nproc-per-node", "3"], "cannot be used multiple times"),
        (&["--rdzv-conf", "join_time=3"], "there are join_timeout"),
        (&["--local-ranks-filter", "x"], "no local rank"),
        (&["--tee", "4"], "none of 0"),
    ] {
        let output = output(phalanx(options, "true"));
        assert_eq!(output.status.code(), Some(2), "{options:?}");
        assert!(text(&output.stderr).contains(expected), "{}", text(&output.stderr));
    }
}

#[test]
fn what_is_no_host_is_refused_before_anybody_waits_for_its_address() {
    for (options, why) in [
        (&["--master-addr", "tcp://node0"][..], "\"tcp://node0\" is no place to meet: it is a URL"),
        (&["--master-addr", "node0:29500"], "its port by itself"),
        (&["--rdzv-endpoint", ":29500"], "it is empty"),
        (&["--nnodes", "2", "--rdzv-endpoint", "http://node0:29500"], "it is a URL"),
        (&["-H", "localhost:1,127.0.0.1:1", "--master-addr", "node0:29500"], "its port by itself"),
    ] {
        // In a pod a name may get its address for as long as the job waits.
        let mut command = phalanx(options, "true");
        command.env("KUBERNETES_SERVICE_HOST", "10.0.0.1");
        let output = output(command);
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{options:?}: {err}");
        assert!(err.contains(why) && err.contains("--master-addr or --rdzv-endpoint"), "{options:?}: {err}");
    }
}

/// As an operator of Kubernetes sets them, for all containers of a pod.
#[test]
fn an_option_that_a_variable_gives_is_named_where_it_excludes_another() {
    let mut command = bare();
    command.args(["-np", "2", "--", "true"]).env("PET_NPROC_PER_NODE", "4");
    let refused = output(command);
    let err = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{err}");
    assert!(
        err.contains("--nproc-per-node <N> comes from the variable PET_NPROC_PER_NODE: unset it"),
        "{err}"
    );
    // Who has typed both knows it.
    let mut command = bare();
    command.args(["-np", "2", "--nproc_per_node=3", "--", "true"]).env("PET_NPROC_PER_NODE", "4");
    let refused = output(command);
    let err = text(&refused.stderr);
    assert!(refused.status.code() == Some(2) && !err.contains("PET_"), "{err}");
    // A switch that is off excludes nothing.
    let mut command = bare();
    command.args(["-H", "localhost:1", "--no-python", "--", "echo", "hello"]);
    command.env("PET_STANDALONE", "False").env("PET_MODULE", "0");
    let ran = output(command);
    assert_eq!(text(&ran.stdout), "[0] hello\n", "{}", text(&ran.stderr));
}

#[test]
fn pods_that_each_train_by_themselves_are_told() {
    let mut command = phalanx(&[], "echo $RANK of $WORLD_SIZE");
    command.env("RANK", "1").env("WORLD_SIZE", "2");
    let output = output(command);
    let err = text(&output.stderr);
    assert_eq!(text(&output.stdout), "[0] 0 of 1\n", "{err}");
    assert!(err.contains("RANK=1 and WORLD_SIZE=2 say that this command was started several times"), "{err}");
}

#[test]
fn a_program_that_reads_the_events_reads_also_why_a_job_has_not_started() {
    for (words, code, why) in [
        (&["--", "/no/such/program"][..], 127, "cannot start /no/such/program as rank 0"),
        (&["--hostfile", "/no/such/file", "--", "true"], 2, "--hostfile /no/such/file"),
        (&["--log-dir", "/dev/null", "--tee", "3", "--", "true"], 1, "cannot make /dev/null"),
    ] {
        let mut command = bare();
        command.args(["--log-format", "json"]).args(words);
        let output = output(command);
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{err}");
        let lines: Vec<serde_json::Value> =
            err.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let last = lines.last().unwrap();
        assert_eq!((&last["event"], &last["outcome"]), (&"ended".into(), &"error".into()), "{err}");
        assert_eq!(last["exit_code"], code, "{err}");
        assert!(last["message"].as_str().unwrap().contains(why), "{err}");
    }
}

#[test]
fn horovodrun_is_run_with_horovods_variables() {
    let folder = tempfile::tempdir().unwrap();
    let link = folder.path().join("horovodrun");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_phalanx"), &link).unwrap();
    let script = "echo $RANK $HOROVOD_RANK/$HOROVOD_SIZE $HOROVOD_LOCAL_RANK/$HOROVOD_LOCAL_SIZE \
                  $HOROVOD_CROSS_RANK/$HOROVOD_CROSS_SIZE $HOROVOD_FUSION_THRESHOLD";
    let under = |program: &Path, before: &[&str]| {
        let mut command = environment::command(program);
        command.args(before).args([
            "-np",
            "2",
            "-H",
            "localhost:2",
            "--fusion-threshold-mb",
            "1",
            "sh",
            "-c",
            script,
        ]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        output(command)
    };
    for result in [under(&link, &[]), under(env!("CARGO_BIN_EXE_phalanx").as_ref(), &["horovodrun"])] {
        assert_eq!(
            sorted_lines(&result.stdout),
            ["[0] 0 0/2 0/2 0/1 1048576", "[1] 1 1/2 1/2 0/1 1048576"],
            "{}",
            text(&result.stderr)
        );
    }
    let refused = {
        let mut command = environment::command(&link);
        command.args(["-np", "2", "--mpi", "true"]).stdout(Stdio::piped()).stderr(Stdio::piped());
        output(command)
    };
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stderr).contains("--mpi has no meaning here"), "{}", text(&refused.stderr));
    // As horovodrun: no world of one for who has forgotten it.
    let refused = {
        let mut command = environment::command(&link);
        command.arg("true").stdout(Stdio::piped()).stderr(Stdio::piped());
        output(command)
    };
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stderr).contains("Give -np N"), "{}", text(&refused.stderr));
}
