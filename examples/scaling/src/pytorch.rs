//! The same on PyTorch, if it is there.

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::{Figures, Options, RANKS, parallel, show};

/// Prints a line for each model, or why there is none.
pub fn measure_all(options: &Options) -> Result<()> {
    let view = options.view.then_some("--view");
    let models = options.models.iter().map(|model| model.text());
    measure("ddp.py", RANKS, options.steps, view.into_iter().chain(models), |line| {
        let figures: Figures = serde_json::from_str(line)?;
        if options.json {
            println!("{{\"framework\":\"pytorch\",{}", &line[1..]);
            return Ok(());
        }
        show("PyTorch", &figures, false, false)
    })
}

/// Prints a line for each of PyTorch's ways to spread a model over ranks, or why there is none.
pub fn measure_parallel(ranks: u32, steps: usize) -> Result<()> {
    #[derive(Deserialize)]
    struct Way {
        way: String,
        parameters: usize,
        step_ms: f64,
    }
    measure("parallel.py", ranks, steps, [], |line| {
        let Way { way, parameters, step_ms } = serde_json::from_str(line)?;
        parallel::show(&format!("PyTorch: {way}"), parameters, step_ms, None);
        Ok(())
    })
}

/// Runs a script of bench/peers, which prints a line of JSON for each thing that it measures.
fn measure<'a>(
    script: &str,
    ranks: u32,
    steps: usize,
    more: impl IntoIterator<Item = &'a str>,
    mut print: impl FnMut(&str) -> Result<()>,
) -> Result<()> {
    let Some(python) = python_with_torch() else { return Ok(()) };
    let script = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/peers")).join(script);
    let mut peer = Command::new(python)
        .arg(&script)
        .args(["--ranks", &ranks.to_string(), "--steps", &steps.to_string()])
        .args(more)
        .envs(["OMP_NUM_THREADS", "MKL_NUM_THREADS"].map(|threads| (threads, "1")))
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("{} did not start", script.display()))?;
    if let Some(lines) = peer.stdout.take() {
        for line in BufReader::new(lines).lines() {
            let line = line?;
            // gloo of some versions reports its connections there.
            if !line.starts_with('{') {
                eprintln!("{line}");
                continue;
            }
            print(&line).with_context(|| line.clone())?;
        }
    }
    ensure!(peer.wait()?.success(), "{} failed", script.display());
    Ok(())
}

/// `$PYTHON`, or `python3`. None if it finds no torch, and then says so.
fn python_with_torch() -> Option<OsString> {
    let python = std::env::var_os("PYTHON").filter(|path| !path.is_empty()).unwrap_or("python3".into());
    let finds_torch = Command::new(&python)
        .args(["-c", "import torch.distributed"])
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if !finds_torch {
        eprintln!("{} finds no torch: its figures are left out", python.display());
    }
    finds_torch.then_some(python)
}
