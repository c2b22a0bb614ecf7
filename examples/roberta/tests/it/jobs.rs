//! The program itself, with two processes as ranks.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use burn::tensor::Device;
use roberta::{Classifier, weights};

use crate::fixtures::{Corpus, Record};

fn fine_tune(corpus: &Corpus, out: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_roberta"));
    command
        .args([
            "fine-tune",
            "--ranks",
            "2",
            "--epochs",
            "3",
            "--batch-size",
            "4",
            "--save-every",
            "5",
            "--max-tokens",
            "16",
        ])
        .args(["--lr", "0.003", "--accumulate", "2"])
        .arg("--model")
        .arg(corpus.folder.path())
        .arg("--data")
        .arg(corpus.folder.path())
        .arg("--out")
        .arg(corpus.path(out))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn output(command: &mut Command) -> (Output, String) {
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    (output, text)
}

fn corpus(train: usize) -> Corpus {
    let corpus = Corpus::new(train, 9);
    let model = Classifier::new(&corpus.config, 2, &Device::flex());
    weights::save(&model, corpus.config.model_type, &corpus.path("model.safetensors")).unwrap();
    corpus
}

/// How many checkpoints a folder has.
fn checkpoints(folder: &Path) -> usize {
    let entries = fs::read_dir(folder.join("checkpoints")).into_iter().flatten().flatten();
    // One that is being written has no number in front.
    entries.filter(|entry| entry.file_name().to_string_lossy().starts_with('0')).count()
}

#[test]
fn a_killed_job_goes_on_in_the_middle_of_an_epoch_and_ends_as_if_nothing_had_happened() {
    let corpus = corpus(240);
    let (whole, errors) = output(&mut fine_tune(&corpus, "whole"));
    assert!(whole.status.success(), "{errors}");

    let mut killed = fine_tune(&corpus, "killed").spawn().unwrap();
    let begun = Instant::now();
    while checkpoints(&corpus.path("killed")) == 0 {
        assert!(begun.elapsed() < Duration::from_secs(60), "no checkpoint after a minute");
        std::thread::sleep(Duration::from_millis(1));
    }
    killed.kill().unwrap();
    // Its workers, which hold the other ends of its pipes, end with it.
    let killed = killed.wait_with_output().unwrap();
    assert!(!killed.status.success(), "it was done before it was killed");

    let (resumed, errors) = output(&mut fine_tune(&corpus, "killed"));
    assert!(resumed.status.success(), "{errors}");
    assert!(errors.contains("goes on after "), "{errors}");
    let read = |out: &str| fs::read(corpus.path(out).join("best/model.safetensors")).unwrap();
    assert!(read("whole") == read("killed"), "the best models differ");
    let record = |out: &str| Record::read(&corpus.path(out)).of_the_training();
    assert_eq!(record("whole"), record("killed"), "no step is missing, and none is there twice");
    assert_eq!(record("whole").steps("train/loss"), (1..=45).collect::<Vec<_>>());
    let printed = String::from_utf8_lossy(&whole.stderr).into_owned();
    assert_eq!(printed.matches("epoch 3: loss ").count(), 1, "one rank alone prints: {printed}");
    assert!(!printed.contains("perplexity"), "a label is no token: {printed}");
    for log in ["logs/rank-0.log", "logs/rank-1.log"] {
        assert!(corpus.path("whole").join(log).exists(), "{log}");
    }
}

#[test]
fn bad_input_is_an_error_that_names_it() {
    let corpus = corpus(8);
    let refused = || {
        let (output, errors) = output(&mut fine_tune(&corpus, "refused"));
        assert_eq!(output.status.code(), Some(1), "{errors}");
        assert!(!errors.contains("panicked"), "{errors}");
        errors
    };
    let lines = fs::read_to_string(corpus.path("train.jsonl")).unwrap();
    fs::write(corpus.path("train.jsonl"), lines.replacen("\"label\": 1", "\"label\": 7", 1)).unwrap();
    let errors = refused();
    assert!(errors.contains("train.jsonl:2: label 7 is out of range"), "{errors}");
    fs::write(corpus.path("train.jsonl"), lines).unwrap();

    let weights = fs::read(corpus.path("model.safetensors")).unwrap();
    fs::write(corpus.path("model.safetensors"), &weights[..weights.len() / 2]).unwrap();
    let errors = refused();
    assert!(errors.contains("model.safetensors cannot be loaded: "), "{errors}");
}
