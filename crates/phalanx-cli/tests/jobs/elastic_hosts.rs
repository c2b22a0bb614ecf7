//! `phalanx run --min-np` on several hosts: they are lost, come back, and come and go as a script says. A script stands in for
//! ssh. This program starts itself as the workers.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use phalanx::elastic::{self, Context, Plain};
use phalanx::{ProcessGroup, ReduceOp};
use rustix::process::{Pid, Signal, kill_process};

use crate::ROLE;
use crate::support::network::{Network, THERE};
use crate::support::stand_in::Hosts;
use crate::support::{exit_code, wait_until_gone};

const FOLDER: &str = "TEST_FOLDER";
const TIMEOUT: Duration = Duration::from_secs(60);

pub const TESTS: &[(&str, fn())] = &[
    ("a_host_whose_launcher_is_killed_costs_its_workers_only_and_comes_back", a_host_comes_back),
    ("hosts_come_and_go_as_a_script_says", hosts_come_and_go_as_a_script_says),
    ("workers_are_replaced_as_often_as_allowed_on_all_hosts_together", workers_are_replaced),
    ("a_host_that_cannot_be_reached_is_left_out", a_host_that_cannot_be_reached_is_left_out),
    ("too_few_end_the_job_at_once_if_nobody_can_come", too_few_end_the_job_at_once),
    ("a_signal_ends_all_hosts", a_signal_ends_all_hosts),
];

/// It needs root, openssh-server and iproute2.
pub const PRIVILEGED: &[(&str, fn())] =
    &[("two_hosts_a_cut_cable_and_a_healed_one", a_cut_cable_and_a_healed_one)];

/// What this program does as a worker.
pub fn work() {
    train(Path::new(&std::env::var_os(FOLDER).unwrap())).unwrap();
}

/// Trains until there is a file `end`.
fn train(folder: &Path) -> phalanx::Result<()> {
    let place = std::env::var("RANK").unwrap();
    let (pid, launcher) = (std::process::id(), std::os::unix::process::parent_id());
    println!("up {place} pid {pid} launcher {launcher}");
    let mut state = Plain((0_u64, vec![0.0_f32; 8]));
    elastic::run(&mut state, |context: &mut Context<'_, Plain<(u64, Vec<f32>)>>, group: &ProcessGroup| {
        println!("world {} from {} pid {pid}", group.world_size(), context.state.0.0);
        loop {
            let mut ends = [f32::from(u8::from(folder.join("end").exists()))];
            group.all_reduce(&mut ends, ReduceOp::Max)?;
            if ends[0] > 0.0 {
                return Ok(());
            }
            let step = context.state.0.0;
            let mut gradient: Vec<f32> =
                (0..8).map(|index| ((step * 8 + index) % 97) as f32 * 0.01).collect();
            group.all_reduce(&mut gradient, ReduceOp::Avg)?;
            context.state.0.1.iter_mut().zip(&gradient).for_each(|(weight, change)| *weight += change);
            context.state.0.0 += 1;
            std::thread::sleep(Duration::from_millis(2));
            context.commit()?;
        }
    })?;
    let bits: Vec<u32> = state.0.1.iter().map(|weight| weight.to_bits()).collect();
    println!("done {} {bits:x?}", state.0.0);
    Ok(())
}

/// A job that runs, and its workers' lines.
struct Job {
    hosts: Hosts,
    child: Child,
    lines: Receiver<String>,
    seen: Vec<String>,
    errors: Receiver<String>,
    err: String,
}

impl Job {
    fn start(list: &str, options: &[&str]) -> Self {
        let hosts = Hosts::new();
        let mut command = hosts.run(list, options);
        command
            .env(ROLE, "elastic_hosts")
            .env(FOLDER, hosts.path())
            .arg("--")
            .arg(std::env::current_exe().unwrap());
        Self::spawn(hosts, command)
    }

    fn spawn(hosts: Hosts, mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let lines = lines_of(child.stdout.take().unwrap());
        let errors = lines_of(child.stderr.take().unwrap());
        Self { hosts, child, lines, seen: Vec::new(), errors, err: String::new() }
    }

    /// Reads on until so many lines have come since `mark` that contain `words`; gives them.
    fn wait_for(&mut self, mark: usize, count: usize, words: &str) -> Vec<String> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let found: Vec<String> =
                self.seen[mark..].iter().filter(|line| line.contains(words)).cloned().collect();
            if found.len() >= count {
                return found;
            }
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => self.seen.push(line),
                Err(why) => {
                    let _ = self.child.kill();
                    let err = self.err();
                    panic!("{count} times {words:?}: {why}; {:#?} {err}", self.seen);
                }
            }
        }
    }

    /// Where the lines to come begin.
    fn mark(&mut self) -> usize {
        self.seen.extend(self.lines.try_iter());
        self.seen.len()
    }

    fn launcher_of(&self, place: u32) -> String {
        let words = format!("up {place} ");
        let line = self.seen.iter().rev().find(|line| line.contains(&words)).unwrap();
        line.rsplit(' ').next().unwrap().to_owned()
    }

    /// All that was said on standard error, when the command has ended.
    fn err(&mut self) -> String {
        for line in self.errors.iter() {
            self.err += &(line + "\n");
        }
        self.err.clone()
    }

    fn wait_for_err(&mut self, words: &str) {
        let deadline = Instant::now() + TIMEOUT;
        while !self.err.contains(words) {
            match self.errors.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => self.err += &(line + "\n"),
                Err(why) => panic!("no {words:?}: {why}; {}", self.err),
            }
        }
    }

    /// Lets the training end: `workers` have the same model. Gives what was said on standard error.
    fn finish(mut self, workers: usize) -> String {
        std::fs::write(self.hosts.path().join("end"), "").unwrap();
        let done = self.wait_for(0, workers, "] done ");
        let code = exit_code(&mut self.child);
        let err = self.err();
        assert_eq!(code, Some(0), "{err}");
        let models: BTreeSet<&str> = done.iter().map(|line| line.split_once("] ").unwrap().1).collect();
        assert_eq!((models.len(), done.len()), (1, workers), "{done:#?} {err}");
        err
    }
}

/// Also if the test fails.
impl Drop for Job {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn lines_of(stream: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
    });
    lines
}

fn pids(lines: &[String]) -> BTreeSet<String> {
    lines.iter().map(|line| line.rsplit(' ').next().unwrap().to_owned()).collect()
}

fn kill(pid: &str) {
    kill_process(Pid::from_raw(pid.parse().unwrap()).unwrap(), Signal::KILL).unwrap();
}

fn a_host_comes_back() {
    let options = ["--min-np", "1", "--max-restarts", "2", "--blacklist-cooldown-range", "0.5", "2"];
    let mut job = Job::start("far1:2,far2:2", &options);
    let all = pids(&job.wait_for(0, 4, "world 4"));
    let mark = job.mark();
    let killed = Instant::now();
    kill(&job.launcher_of(2));
    let left = pids(&job.wait_for(mark, 2, "world 2"));
    assert!(killed.elapsed() < Duration::from_secs(40));
    // They are the same processes, and so they are in the larger world.
    assert!(left.is_subset(&all) && left.len() == 2);
    let again = pids(&job.wait_for(mark, 4, "world 4"));
    assert!(left.is_subset(&again), "{left:?} {again:?}");
    let err = job.finish(4);
    assert!(err.contains("far2: the connection to its launcher is lost"), "{err}");
    assert!(err.contains("it is left out for 0.5 s") && !err.contains("The first failure"), "{err}");
}

fn hosts_come_and_go_as_a_script_says() {
    let hosts = Hosts::new();
    hosts.name("far1:2");
    let mut command = hosts.discovered(&["--min-np", "1", "--max-np", "4", "--slots", "2"]);
    command
        .env(ROLE, "elastic_hosts")
        .env(FOLDER, hosts.path())
        .arg("--")
        .arg(std::env::current_exe().unwrap());
    let mut job = Job::spawn(hosts, command);
    let first = pids(&job.wait_for(0, 2, "world 2"));
    let mark = job.mark();
    // A host without a number takes --slots, and there is no room for the third.
    job.hosts.name("far1:2\nfar2\nfar3:2");
    assert!(pids(&job.wait_for(mark, 4, "world 4")).is_superset(&first));
    let mark = job.mark();
    // An answer that cannot be used changes nothing.
    job.hosts.name("far1 2 two");
    job.wait_for_err("--host-discovery-script");
    job.hosts.name("far2:2");
    let rest = pids(&job.wait_for(mark, 2, "world 2"));
    assert!(rest.is_disjoint(&first));
    wait_until_gone(&first);
    let err = job.finish(2);
    assert!(err.contains("far1 is no longer in the host list"), "{err}");
    assert_eq!(err.matches("--host-discovery-script").count(), 1, "{err}");
}

fn workers_are_replaced() {
    let mut job = Job::start("far1:2,far2:1", &["--min-np", "1", "--max-restarts", "2"]);
    job.wait_for(0, 3, "world 3");
    let kill_place = |job: &mut Job, place: u32| {
        let words = format!("up {place} ");
        let up = job.seen.iter().rev().find(|line| line.contains(&words)).unwrap();
        let pid = up.split(' ').skip_while(|word| *word != "pid").nth(1).unwrap().to_owned();
        let mark = job.mark();
        kill(&pid);
        mark
    };
    for place in [1, 2] {
        let mark = kill_place(&mut job, place);
        job.wait_for(mark, 3, "world 3");
    }
    let mark = kill_place(&mut job, 0);
    job.wait_for(mark, 2, "world 2");
    let err = job.finish(2);
    for expected in ["rank 1 is replaced (1 of 2)", "rank 2 is replaced (2 of 2)", "rank 0 is not replaced"] {
        assert!(err.contains(expected), "{err}");
    }
}

fn a_host_that_cannot_be_reached_is_left_out() {
    let mut job = Job::start("bad-key:2,far1:1,localhost:1", &["--min-np", "2"]);
    job.wait_for(0, 2, "world 2");
    let err = job.finish(2);
    assert!(err.contains("bad-key: it accepts none of the keys"), "{err}");
    assert!(err.contains("left out for 5 s"), "{err}");

    let mut job = Job::start("bad-key:1,bad-name:1", &["--min-np", "1"]);
    assert_eq!(exit_code(&mut job.child), Some(1));
    let err = job.err();
    assert!(err.contains("bad-key: it accepts") && err.contains("bad-name: there is no host"), "{err}");
}

fn too_few_end_the_job_at_once() {
    let mut job = Job::start("far1:1,far2:1", &["--min-np", "2"]);
    job.wait_for(0, 2, "world 2");
    kill(&job.launcher_of(1));
    let code = exit_code(&mut job.child);
    let err = job.err();
    assert!(code == Some(1) && err.contains("far2: the connection to its launcher is lost"), "{err}");
}

fn a_signal_ends_all_hosts() {
    let mut job = Job::start("far1:1,localhost:1", &["--min-np", "1", "--max-restarts", "5"]);
    let pids = pids(&job.wait_for(0, 2, "world 2"));
    crate::support::send(&job.child, Signal::TERM);
    assert_eq!(exit_code(&mut job.child), Some(143));
    wait_until_gone(&pids);
}

fn a_cut_cable_and_a_healed_one() {
    let network = Network::new();
    let hosts = Hosts::new();
    let options = ["--min-np", "1", "--max-restarts", "2", "--blacklist-cooldown-range", "1", "4"];
    let program = format!("exec {}", std::env::current_exe().unwrap().display());
    let mut command = network.run(&format!("localhost:2,{THERE}:2"), &options, &program);
    command.env(ROLE, "elastic_hosts").env(FOLDER, hosts.path());
    let mut job = Job::spawn(hosts, command);
    let all = pids(&job.wait_for(0, 4, "world 4"));
    let mark = job.mark();
    let cut = Instant::now();
    network.set_cable("down");
    let left = pids(&job.wait_for(mark, 2, "world 2"));
    let took = cut.elapsed();
    println!("from the cut to the smaller group: {:.1} s", took.as_secs_f64());
    assert!(took < Duration::from_secs(25), "{took:?}");
    // The far side has been given up, and nothing of it comes back by itself.
    job.wait_for_err("the connection to its launcher is lost");
    let healed = Instant::now();
    network.set_cable("up");
    let again = pids(&job.wait_for(mark, 4, "world 4"));
    println!("from the healing to the larger group: {:.1} s", healed.elapsed().as_secs_f64());
    assert!(left.is_subset(&all) && left.is_subset(&again), "{all:?} {left:?} {again:?}");
    assert_eq!(again.intersection(&all).count(), 2, "{all:?} {again:?}");
    job.finish(4);
}
