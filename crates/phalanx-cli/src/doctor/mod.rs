//! `phalanx doctor`: checks what this machine and its environment offer a job.

mod finding;
mod host;
mod interfaces;
mod launcher;
mod libraries;
mod trial;
mod variables;
mod world;

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;

pub(crate) use self::finding::Report;
use crate::cli::seconds;
use crate::output::print;
use crate::render::wants_colour;

const ABOUT: &str = "\
Checks what this machine and its environment offer a job, and names a remedy for each defect.

It starts two processes for a moment, to measure shared memory and TCP between them. Under a launcher \
(`phalanx run -- phalanx doctor`) all ranks check their hosts, and rank 0 reports for all: its own host, what differs on \
the others, and their clocks. The exit code is 1 if there is a defect.";

/// Check what this machine and its environment offer a job
#[derive(Args, Debug)]
#[command(long_about = ABOUT)]
pub(crate) struct Doctor {
    /// A store to connect to, as host:port [default: the launcher's, if it serves one]
    #[arg(long, value_name = "HOST:PORT", value_parser = host_port)]
    store: Option<String>,

    /// How long ranks under a launcher wait for each other
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    timeout: Duration,

    /// Print one JSON object instead of lines
    #[arg(long)]
    json: bool,

    /// Be one of the processes that are timed: this many calls a round
    #[arg(long, value_name = "CALLS", hide = true)]
    measure: Option<u32>,
}

/// A store's place, as it was given.
fn host_port(text: &str) -> Result<String, String> {
    let (host, port) = text.rsplit_once(':').unwrap_or_default();
    let is_host = match host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        Some(bare) => bare.contains(':'),
        None => !host.is_empty() && !host.contains([':', '/', ' ']),
    };
    match port.parse::<u16>() {
        Ok(1..) if is_host => Ok(text.to_owned()),
        _ => Err("give host:port, such as node0:29500, or [::1]:29500".to_owned()),
    }
}

/// Checks, and prints the report.
pub(crate) fn run(options: &Doctor) -> ExitCode {
    if let Some(calls) = options.measure {
        return trial::work(calls);
    }
    match look(options) {
        Some(report) => tell(options, &report),
        // Rank 0 prints.
        None => ExitCode::SUCCESS,
    }
}

/// The report of this rank.
fn look(options: &Doctor) -> Option<Report> {
    let place = launcher::Place::of_process();
    let mut report = Report::new(phalanx::host_name());
    host::look(&mut report, place.world_size());
    let target = options.store.clone().or_else(|| place.store());
    interfaces::look(&mut report, target.as_deref(), place.meeting().as_deref());
    libraries::look(&mut report);
    launcher::look(&mut report, &place);
    let takes_all = variables::look(&mut report);
    if let Some(target) = target {
        launcher::reach(&mut report, &target);
    }
    let has_loopback = interfaces::look_at_loopback(&mut report);
    if place.is_main() && has_loopback {
        trial::look(&mut report);
    }
    if place.world_size() == 1 {
        return Some(report);
    }
    world::gather(&report, options.timeout).unwrap_or_else(|error| {
        // Each rank reports about itself: only it can. A bad setting, which prevents a group too, has been told already.
        if takes_all {
            report.failed("group", &error, "compare what the ranks say of interface and store");
        }
        Some(report)
    })
}

fn tell(options: &Doctor, report: &Report) -> ExitCode {
    let text = match options.json {
        true => report.json(),
        false => report.text(wants_colour(&io::stdout())),
    };
    match print(text.as_bytes()) {
        Ok(()) if report.is_good() => ExitCode::SUCCESS,
        Ok(()) => ExitCode::FAILURE,
        Err(message) => {
            let _ = writeln!(io::stderr(), "phalanx: {message}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_is_a_host_and_a_port() {
        for good in ["node0:29500", "127.0.0.1:1", "[::1]:29500", "[fe80::1%eth0]:7"] {
            assert_eq!(host_port(good).as_deref(), Ok(good));
        }
        for bad in [
            "",
            "node0",
            "node0:",
            "node0:x",
            "node0:0",
            "node0:70000",
            ":1",
            "::1:1",
            "tcp://node0:1",
            "[]:1",
        ] {
            assert!(host_port(bad).unwrap_err().starts_with("give host:port"), "{bad}");
        }
    }
}
