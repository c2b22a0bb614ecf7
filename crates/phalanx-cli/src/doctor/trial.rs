//! Two processes of this host, and an all_reduce between them: what shared memory and TCP really do here.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde::Deserialize;

use super::finding::Report;

/// A trial takes about a second.
const PATIENCE: Duration = Duration::from_secs(30);

/// What of a line of `phalanx bench --json` is of interest.
#[derive(Debug, Deserialize)]
struct Row {
    bytes: u64,
    time_us: f64,
    busbw_gbs: f64,
    wrong: u64,
}

pub(super) fn look(report: &mut Report) {
    for (check, transport, remedy) in [
        (
            "shared memory",
            "shm",
            "may processes of one user open each other's /proc/<pid>/fd, and is memory limited?",
        ),
        ("tcp", "tcp", "may processes connect to each other at the loopback?"),
    ] {
        match measure(transport).and_then(|text| summary(&text)) {
            Ok(text) => report.good(check, text),
            Err(cause) => report.bad(check, cause, remedy),
        }
    }
}

/// What `phalanx bench` says of a small and a larger all_reduce between two ranks.
fn measure(transport: &str) -> Result<String, String> {
    let program = std::env::current_exe().map_err(|error| format!("this program is not found: {error}"))?;
    let mut command = Command::new(program);
    command.args(["bench", "all_reduce", "--nproc-per-node", "2", "--transport", transport, "--json"]);
    command.args(["-b", "4", "-e", "1M", "-f", "262144", "-n", "300", "-w", "100"]);
    // In an environment of its own: they are not ranks of any launcher.
    command.env_clear().envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    finish(command.spawn().map_err(|error| format!("two processes cannot be started: {error}"))?)
}

/// Its output, or why there is none.
fn finish(mut child: Child) -> Result<String, String> {
    let deadline = Instant::now() + PATIENCE;
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
            Ok(None) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("two processes were not done within {} s", PATIENCE.as_secs()));
            }
            Err(error) => return Err(error.to_string()),
        }
    };
    let (mut out, mut err) = (String::new(), String::new());
    // What is said is short: it waits in the pipes.
    let _ = child.stdout.take().map(|mut pipe| pipe.read_to_string(&mut out));
    let _ = child.stderr.take().map(|mut pipe| pipe.read_to_string(&mut err));
    match status.success() {
        true => Ok(out),
        false => Err(err.lines().next().unwrap_or("two processes have failed, and said nothing").to_owned()),
    }
}

/// Latency of the smallest, bandwidth of the largest.
fn summary(text: &str) -> Result<String, String> {
    let rows = text.lines().map(serde_json::from_str);
    let rows: Vec<Row> =
        rows.collect::<Result<_, _>>().map_err(|error| format!("not understood: {error}"))?;
    let (Some(small), Some(large)) =
        (rows.iter().min_by_key(|row| row.bytes), rows.iter().max_by_key(|row| row.bytes))
    else {
        return Err("nothing was measured".to_owned());
    };
    if rows.iter().any(|row| row.wrong > 0) {
        return Err("results came out wrong".to_owned());
    }
    let (bytes, time, large, rate) = (small.bytes, small.time_us, large.bytes, large.busbw_gbs);
    Ok(format!("all_reduce of 2 processes: {bytes} B in {time:.1} µs, {large} B at {rate:.1} GB/s"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_summed_up() {
        let row = |bytes, time, rate, wrong| {
            format!(
                "{{\"bytes\":{bytes},\"time_us\":{time},\"busbw_gbs\":{rate},\"wrong\":{wrong},\"name\":\"x\"}}\n"
            )
        };
        let text = row(4, 1.25, 0.1, 0) + &row(1048576, 50.0, 20.0, 0);
        let said = "all_reduce of 2 processes: 4 B in 1.2 µs, 1048576 B at 20.0 GB/s";
        assert_eq!(summary(&text), Ok(said.to_owned()));
        assert!(summary(&row(4, 1.0, 1.0, 3)).is_err_and(|cause| cause.contains("wrong")));
        assert!(summary("").is_err() && summary("x").is_err());
    }
}
