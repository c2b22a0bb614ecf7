//! `phalanx run -H` over the real thing: OpenSSH between two network namespaces of this machine. It needs root,
//! openssh-server and iproute2: `.ci/full` runs it.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use crate::support::network::{HERE, Network, THERE};
use crate::support::{SUM, exit_code, is_gone, output, text};

fn assert_refused(output: &Output, expected: &str) {
    let err = text(&output.stderr);
    assert!(output.status.code() == Some(1) && err.contains(expected), "no {expected:?} in {err}");
}

#[test]
#[ignore = "needs root, openssh-server and iproute2: .ci/full runs it"]
fn hosts_are_reached_over_ssh() {
    let network = Network::new();
    let sum = format!("{SUM} && echo $MASTER_ADDR");

    // Node 0 is found at the address that ssh uses, whichever side it is on.
    for (hosts, meeting) in [("localhost:1,10.98.0.2:2", HERE), ("10.98.0.2:2,localhost:1", THERE)] {
        let output = output(network.run(hosts, &[], &sum));
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        assert_eq!(text(&output.stdout).matches(meeting).count(), 3, "{}", text(&output.stdout));
    }

    let never = |command: Command, expected: &str| assert_refused(&output(command), expected);
    never(network.run("10.98.0.9:1", &["--start-timeout", "10"], "true"), "10.98.0.9: it cannot be reached");
    never(
        network.run("10.98.0.2:1", &["--ssh-port", "2223"], "true"),
        "10.98.0.2: no ssh server listens there",
    );
    never(
        network.run_as("stranger", "known", "10.98.0.2:1", &[], "true"),
        "10.98.0.2: it accepts none of the keys",
    );
    never(
        network.run_as("user", "nobody", "10.98.0.2:1", &[], "true"),
        "10.98.0.2: its host key is not known",
    );

    let start = || {
        let script = "echo up $$; exec sleep 60";
        let mut child = network.run("localhost:1,10.98.0.2:1", &[], script).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let pids = [(); 2].map(|()| {
            let mut line = String::new();
            out.read_line(&mut line).unwrap();
            line.trim().rsplit_once(' ').unwrap().1.to_owned()
        });
        (child, out, pids)
    };
    let gone = |pids: &[String]| {
        let started = Instant::now();
        while !pids.iter().all(|pid| is_gone(pid)) {
            assert!(started.elapsed() < Duration::from_secs(20), "{pids:?} are still there");
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    // The command is killed: nothing stays on either host.
    let (mut child, _out, pids) = start();
    child.kill().unwrap();
    child.wait().unwrap();
    gone(&pids);

    // The cable is cut: both sides notice.
    let (mut child, _out, pids) = start();
    network.set_cable("down");
    gone(&pids);
    let limit = Instant::now() + Duration::from_secs(20);
    while Instant::now() < limit && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(exit_code(&mut child), Some(1));
    let mut err = String::new();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    // Either ssh says so, or before it the other launcher, whose node is shown under the name of -H.
    let by_launcher = err.contains("host    10.98.0.2") && err.contains("its launcher has not been heard of");
    assert!(by_launcher || err.contains("10.98.0.2: the connection to its launcher is lost"), "{err}");
}
