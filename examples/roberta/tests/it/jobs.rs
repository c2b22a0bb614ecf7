//! The program itself, with two processes as ranks.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::ops::ControlFlow;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use burn::tensor::Device;
use phalanx::WorldSize;
use phalanx::launch::{Event, Job, Outcome, Stream};
use roberta::{Classifier, weights};

use crate::environment;
use crate::fixtures::{Corpus, Record};

fn fine_tune(corpus: &Corpus, out: &str) -> Command {
    let mut command = environment::command(env!("CARGO_BIN_EXE_roberta"));
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
    with_layers(train, 1)
}

fn with_layers(train: usize, layers: usize) -> Corpus {
    let corpus = Corpus::with_layers(train, 9, layers);
    let model = Classifier::new(&corpus.config, 2, &Device::flex());
    weights::save(&model, corpus.config.model_type, &corpus.path("model.safetensors")).unwrap();
    let labels = ["ham", "spam"].map(str::to_owned);
    let config = corpus.config.clone().with_labels("RobertaForSequenceClassification", &labels);
    fs::write(corpus.path("config.json"), serde_json::to_string(&config).unwrap()).unwrap();
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

    let begun = Instant::now();
    loop {
        let mut killed = fine_tune(&corpus, "killed").spawn().unwrap();
        while checkpoints(&corpus.path("killed")) == 0 {
            assert!(begun.elapsed() < Duration::from_secs(120), "no checkpoint after two minutes");
            std::thread::sleep(Duration::from_millis(1));
        }
        killed.kill().unwrap();
        // Its workers, which hold the other ends of its pipes, end with it.
        let killed = killed.wait_with_output().unwrap();
        if !killed.status.success() {
            break;
        }
        // It was done before it was killed, because this process was held up: that says nothing.
        assert!(begun.elapsed() < Duration::from_secs(120), "it is always done before it is killed");
        fs::remove_dir_all(corpus.path("killed")).unwrap();
    }

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
        assert!(
            !errors.contains("fetch.py") && !errors.contains("--lr"),
            "the files are the user's: {errors}"
        );
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

    fs::write(corpus.path("model.safetensors"), &weights).unwrap();
    let config = fs::read_to_string(corpus.path("config.json")).unwrap();
    fs::write(corpus.path("config.json"), config.replace("spam", "eggs")).unwrap();
    let errors = refused();
    assert!(errors.contains("has the labels [ham, eggs], the data has [ham, spam]"), "{errors}");
    let (begun_anew, errors) = output(fine_tune(&corpus, "new-head").arg("--new-head"));
    assert!(begun_anew.status.success(), "{errors}");
    let best = fs::read_to_string(corpus.path("new-head/best/config.json")).unwrap();
    let best: serde_json::Value = serde_json::from_str(&best).unwrap();
    assert_eq!(best["id2label"], serde_json::json!({"0": "ham", "1": "spam"}));
    assert_eq!(best["label2id"], serde_json::json!({"ham": 0, "spam": 1}));

    fs::remove_file(corpus.path("train.jsonl")).unwrap();
    let errors = refused();
    assert!(errors.contains("train.jsonl: there is no such file; the folder has "), "{errors}");
}

#[test]
fn what_a_command_makes_is_named_where_it_is_missing_and_nowhere_else() {
    let empty = tempfile::tempdir().unwrap();
    let said = |arguments: &[&str]| {
        let mut command = environment::command(env!("CARGO_BIN_EXE_roberta"));
        command.args(arguments).args(["--ranks", "1", "--out", "runs"]).current_dir(empty.path());
        let (output, errors) =
            output(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()));
        assert_eq!(output.status.code(), Some(1), "{errors}");
        errors
    };
    let errors = said(&["fine-tune"]);
    assert!(
        errors.contains("out/roberta/mails is not there: `examples/roberta/fetch.py` makes it"),
        "{errors}"
    );
    let corpus = corpus(8);
    let (folder, config) = (corpus.folder.path().display().to_string(), corpus.path("config.json"));
    let errors = said(&["fine-tune", "--data", &folder]);
    assert!(
        errors.contains("out/roberta/minilm is not there: `examples/roberta/fetch.py` makes it"),
        "{errors}"
    );
    let errors = said(&["pretrain", "--data", &folder, "--config", &config.display().to_string()]);
    assert!(
        errors.contains("out/roberta/tokenizer.json is not there: `roberta tokenizer` makes it"),
        "{errors}"
    );
    let errors = said(&["fine-tune", "--data", "of/my/own"]);
    assert!(errors.contains("cannot read of/my/own/labels.json"), "{errors}");
    assert!(errors.contains("there is no such file, and no folder of/my/own"), "{errors}");
    assert!(!errors.contains("fetch.py"), "{errors}");
}

/// What two ranks say of which `culprit` alone has the folder `bad`. For the launcher a rank succeeds when its program
/// fails: it would end the other rank half a second after the first failure, which may not have spoken by then.
fn said_with_bad_input_of_one_rank(good: &Corpus, bad: &Path, culprit: u32) -> [String; 2] {
    let script = "folder=$1; [ \"$RANK\" != \"$CULPRIT\" ] || folder=$2; shift 2; \
                  ! \"$@\" --model \"$folder\" --data \"$folder\"";
    let mut arguments: Vec<String> = ["-c", script, "sh"].map(str::to_owned).to_vec();
    arguments.extend([good.folder.path(), bad].map(|folder| folder.display().to_string()));
    arguments.push(env!("CARGO_BIN_EXE_roberta").to_owned());
    let training = "fine-tune --ranks 2 --epochs 1 --batch-size 2 --max-tokens 16";
    arguments.extend(training.split(' ').map(str::to_owned));
    arguments.extend(["--out".to_owned(), good.path("refused").display().to_string()]);
    let mut said = [String::new(), String::new()];
    let job = Job::new("sh", WorldSize::new(2).unwrap()).arguments(arguments);
    let report = job.variable("CULPRIT", culprit.to_string()).run(&mut |event: Event<'_>| {
        if let Event::Line { rank, stream: Stream::Stderr, text } = event {
            said[rank.index()].push_str(&String::from_utf8_lossy(text));
            said[rank.index()].push('\n');
        }
        ControlFlow::Continue(())
    });
    assert!(matches!(report.unwrap().outcome, Outcome::Succeeded), "{said:?}");
    said
}

#[test]
fn bad_input_of_one_rank_is_a_clear_error_on_every_rank() {
    let good = corpus(8);
    // A folder like the good one, of which one file is changed.
    let with = |name: &str, change: &dyn Fn(&Path)| {
        let bad = tempfile::tempdir().unwrap();
        for file in [
            "config.json",
            "model.safetensors",
            "tokenizer.json",
            "labels.json",
            "train.jsonl",
            "held-out.jsonl",
        ] {
            fs::copy(good.path(file), bad.path().join(file)).unwrap();
        }
        change(&bad.path().join(name));
        bad
    };
    let replace = |from: &str, to: &'static str| {
        let from = from.to_owned();
        move |file: &Path| {
            let text = fs::read_to_string(file).unwrap();
            assert!(text.contains(&from), "{from}");
            fs::write(file, text.replacen(&from, to, 1)).unwrap();
        }
    };
    let rows = format!("\"vocab_size\":{}", good.config.vocab_size);
    let cases = [
        (with("config.json", &replace(&rows, "\"vocab_size\":200")), "tokenizer.json does not fit the model"),
        (
            with("train.jsonl", &replace("\"label\": 1", "\"label\": 7")),
            "train.jsonl:2: label 7 is out of range",
        ),
        // Another size of the model: its file has tensors of other shapes.
        (with("config.json", &replace("\"hidden_size\":16", "\"hidden_size\":32")), "has the shape"),
        (
            with("model.safetensors", &|file| {
                let bytes = fs::read(file).unwrap();
                fs::write(file, &bytes[..bytes.len() / 2]).unwrap();
            }),
            "model.safetensors cannot be loaded: ",
        ),
    ];
    for (culprit, (bad, expected)) in (0..2).cycle().zip(&cases) {
        let said = said_with_bad_input_of_one_rank(&good, bad.path(), culprit);
        for (rank, said) in said.iter().enumerate() {
            assert!(said.contains(expected), "rank {rank}, of {culprit}: {expected:?} is not in {said}");
        }
    }
}

fn compare(corpus: &Corpus, arguments: &str) -> Command {
    let mut command = environment::command(env!("CARGO_BIN_EXE_roberta"));
    command.args(["compare", "--ranks", "2", "--max-tokens", "16"]).args(arguments.split(' '));
    command.arg("--model").arg(corpus.folder.path()).arg("--data").arg(corpus.folder.path());
    // The stacks of a thread for each processor would be most of what a process has here.
    command.env("RAYON_NUM_THREADS", "1");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[test]
fn a_comparison_says_from_its_start_what_it_does_and_keeps_what_it_has() {
    let corpus = corpus(16);
    let (plot, kept) = (corpus.path("strategies.png"), corpus.path("kept.jsonl"));
    let mut command = compare(&corpus, "--epochs 1 --batch-size 4 --strategies ddp,dp");
    let mut child = command.arg("--plot").arg(&plot).arg("--keep").arg(&kept).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap());
    let mut said = String::new();
    lines.read_line(&mut said).unwrap();
    assert_eq!(said, "[1 of 2] ddp, with the batches of 2 devices\n", "before anything is read or trained");
    lines.read_to_string(&mut said).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{said}");
    let mut rest = said.as_str();
    for expected in [
        "ddp: reads model and tokenizer",
        "ddp: 1 epochs of 2 steps of 8 texts",
        "ddp: looks at 9 held-out texts",
        "[1 of 2] ddp: ",
        "[2 of 2] dp, with the batches of 2 devices",
        "dp: 1 epochs of 2 steps of 8 texts",
        "[2 of 2] dp: ",
    ] {
        let place = rest.find(expected).unwrap_or_else(|| panic!("{expected:?} does not follow in {said}"));
        rest = &rest[place..];
    }
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(table.contains("\nddp ") && table.contains("\ndp "), "{table}");
    let lines = fs::read_to_string(&kept).unwrap();
    assert_eq!(lines.lines().count(), 2);
    assert_eq!(fs::read(plot).unwrap()[..4], *b"\x89PNG");
    // Figures of other batches are not shown beside these.
    let mut others = compare(&corpus, "--epochs 1 --batch-size 8 --strategies ddp");
    let (refused, said) = self::output(others.arg("--keep").arg(&kept));
    assert!(!refused.status.success() && said.contains("give --keep another file"), "{said}");
    assert_eq!(fs::read_to_string(&kept).unwrap(), lines);
}

#[test]
fn parts_of_a_model_in_processes_of_their_own_learn_what_one_process_does() {
    let corpus = with_layers(32, 2);
    let kept = corpus.path("kept.jsonl");
    // Once without dropout, where all must be the same, and once with what the model's config.json says.
    for (arguments, strategies, dropped) in
        [("--dropout 0", "single,ddp,tensor,pipeline", false), ("--seed 1", "pipeline", true)]
    {
        let arguments =
            format!("--ranks 4 --epochs 2 --batch-size 2 --lr 0.003 --strategies {strategies} {arguments}");
        let _ = fs::remove_file(&kept);
        let (output, said) = output(compare(&corpus, &arguments).arg("--keep").arg(&kept));
        assert!(output.status.success(), "{said}");
        let lines = fs::read_to_string(&kept).unwrap();
        let figures = lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        let losses: Vec<f64> = figures.map(|figures| figures["loss"].as_f64().unwrap()).collect();
        assert_eq!(losses.len(), strategies.split(',').count(), "{lines}");
        assert!(losses.iter().all(|loss| loss.is_finite() && *loss < 1.0), "{lines}");
        let apart = losses.iter().map(|loss| (loss - losses[0]).abs()).fold(0.0, f64::max);
        assert!(dropped || apart < 1e-4, "{lines}");
    }
}

#[test]
fn the_largest_batch_is_tried_with_memory_that_is_really_refused() {
    let corpus = corpus(4000);
    let largest = |arguments: &str| {
        let (output, said) = output(&mut compare(&corpus, &format!("--memory-alone {arguments}")));
        assert!(output.status.success(), "{said}");
        let found = String::from_utf8_lossy(&output.stdout).into_owned();
        let batch: usize =
            found.trim().rsplit(' ').next().unwrap().parse().unwrap_or_else(|_| panic!("{found}"));
        for line in [
            format!("ddp: batches of {batch} have room ("),
            format!("ddp: batches of {} have none (", batch + 1),
        ] {
            assert!(said.contains(&line), "{line}: {said}");
        }
        batch
    };
    let with =
        |memory: u32, by: &str| largest(&format!("--strategies ddp --memory {memory} --memory-by {by}"));
    let (small, large) = (with(24, "allocator"), with(34, "allocator"));
    assert!(0 < small && small < large, "{small} {large}");
    assert!(with(24, "rlimit") > 0);
    let (refused, said) = output(&mut compare(&corpus, "--memory 30 --memory-by rlimit --strategies ddp,dp"));
    assert!(
        !refused.status.success() && said.contains("rlimit caps processes, and dp has 2 devices in one"),
        "{said}"
    );
}

#[test]
fn pre_training_draws_how_perplexity_falls() {
    let corpus = corpus(40);
    let plot = corpus.path("perplexity.png");
    let mut command = environment::command(env!("CARGO_BIN_EXE_roberta"));
    let arguments = "pretrain --ranks 2 --epochs 3 --batch-size 4 --lr 0.005 --max-tokens 32 --characters 60";
    command.args(arguments.split(' ')).arg("--data").arg(corpus.folder.path());
    command
        .arg("--config")
        .arg(corpus.path("config.json"))
        .arg("--tokenizer")
        .arg(corpus.path("tokenizer.json"));
    command.arg("--out").arg(corpus.path("language")).arg("--plot").arg(&plot).stdin(Stdio::null());
    let (first, said) = output(&mut command);
    assert!(first.status.success(), "{said}");
    let drawn = fs::read(&plot).unwrap();
    assert_eq!(drawn[..4], *b"\x89PNG");
    // Of a run that is over, the same picture again.
    fs::remove_file(&plot).unwrap();
    let (again, said) = output(&mut command);
    assert!(again.status.success(), "{said}");
    assert!(fs::read(&plot).unwrap() == drawn, "another picture of the same record");
}
