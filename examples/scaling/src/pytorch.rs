//! The same on PyTorch, if it is there.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::{Figures, Options, RANKS, show};

/// Prints a line for each model, or why there is none.
pub fn measure_all(options: &Options) -> Result<()> {
    let python = std::env::var_os("PYTHON").filter(|path| !path.is_empty()).unwrap_or("python3".into());
    let finds_torch = Command::new(&python)
        .args(["-c", "import torch.distributed"])
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if !finds_torch {
        eprintln!("{} finds no torch: its figures are left out", python.display());
        return Ok(());
    }
    let script = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/peers/ddp.py"));
    let mut peer = Command::new(&python)
        .arg(&script)
        .args(["--ranks", &RANKS.to_string(), "--steps", &options.steps.to_string()])
        .args(options.view.then_some("--view"))
        .args(options.models.iter().map(|model| model.text()))
        .envs(["OMP_NUM_THREADS", "MKL_NUM_THREADS"].map(|threads| (threads, "1")))
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("{} did not start", script.display()))?;
    if let Some(lines) = peer.stdout.take() {
        for line in BufReader::new(lines).lines() {
            let line = line?;
            let figures: Figures = serde_json::from_str(&line).with_context(|| line.clone())?;
            if options.json {
                println!("{{\"framework\":\"pytorch\",{}", &line[1..]);
                continue;
            }
            show("PyTorch", &figures, false, false)?;
        }
    }
    ensure!(peer.wait()?.success(), "{} failed", script.display());
    Ok(())
}
