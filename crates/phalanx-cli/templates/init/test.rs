//! The program as its users start it.

use std::process::Command;

#[test]
fn two_ranks_learn() {
    let output = Command::new(env!("CARGO_BIN_EXE_{{name}}")).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{err}");
    let losses: Vec<f32> =
        out.lines().filter_map(|line| line.split_once("loss ")?.1.trim().parse().ok()).collect();
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    assert!(last < first / 10.0, "from {first} to {last}: {out}");
}
