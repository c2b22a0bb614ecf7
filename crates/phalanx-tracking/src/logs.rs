//! Logs: rank 0's on the terminal, every rank's in a file of its own.
//!
//! All events that a program, Phalanx and other libraries log through [`tracing`] go there. `RUST_LOG` filters them, as
//! `info` (the default), `debug`, or `warn,phalanx=debug`.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use phalanx::{Error, Rank, Result};
use tracing::Subscriber;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::{MakeWriter, layer};
use tracing_subscriber::layer::SubscriberExt;

use crate::Console;

/// The variable that says what is logged.
const FILTER: &str = "RUST_LOG";

/// From now on what is logged goes to `rank-R.log` in `directory`, which is made, and that of rank 0 to `console` as well.
///
/// Lines are appended to a file that is there. Call it on every rank, once in a process: `rank` is `group.rank()`. In an elastic job a
/// worker keeps the file with which it began, whatever its rank becomes.
///
/// # Errors
/// If the file cannot be opened; if `RUST_LOG` cannot be understood; if the process has a subscriber already.
#[doc(alias("get_logger", "basicConfig"))]
pub fn install(rank: Rank, directory: impl AsRef<Path>, console: &Console) -> Result<()> {
    let subscriber = subscriber(rank, directory.as_ref(), console)?;
    tracing::subscriber::set_global_default(subscriber).map_err(|error| {
        Error::invalid_argument("the logs have another subscriber already")
            .with_source(error)
            .with_remedy("install one of them, once in a process")
    })
}

/// The subscriber of [`install`], for programs that add layers of their own.
///
/// # Errors
/// If the file cannot be opened; if `RUST_LOG` cannot be understood.
pub fn subscriber(
    rank: Rank,
    directory: &Path,
    console: &Console,
) -> Result<impl Subscriber + Send + Sync + use<>> {
    let wanted = wanted(std::env::var_os(FILTER))?;
    let path = directory.join(format!("rank-{rank}.log"));
    let file = std::fs::create_dir_all(directory)
        .and_then(|()| phalanx_sys::open::unless_pipe(&path, File::options().create(true).append(true)))
        .map_err(|error| {
            Error::aborted(format!("the log {} cannot be opened", path.display()))
                .with_source(error)
                .with_remedy("may this process write files there? Else name another directory")
        })?;
    let file =
        LogFile { file: Mutex::new(file), has_failed: AtomicBool::new(false), console: console.clone() };
    let on_console = rank.is_main().then(|| {
        let console = console.clone();
        layer()
            .with_ansi(console.is_terminal())
            .log_internal_errors(false)
            .with_writer(move || Lines(console.clone()))
    });
    let in_file = layer().with_ansi(false).log_internal_errors(false).with_writer(file);
    Ok(tracing_subscriber::registry().with(wanted).with(in_file).with(on_console))
}

fn wanted(filter: Option<OsString>) -> Result<Targets> {
    let Some(filter) = filter.filter(|filter| !filter.is_empty()) else {
        return Ok(Targets::new().with_default(LevelFilter::INFO));
    };
    let refused = || {
        Error::invalid_argument(format!("{FILTER}={filter:?} is no filter of logs"))
            .with_remedy("it may be error, warn, info, debug or trace, or such as warn,phalanx=debug")
    };
    let text = filter.to_str().ok_or_else(refused)?;
    text.parse::<Targets>().map_err(|error| refused().with_source(error))
}

/// A console, for lines.
struct Lines(Console);

impl Write for Lines {
    fn write(&mut self, lines: &[u8]) -> io::Result<usize> {
        self.0.write_lines(lines)?;
        Ok(lines.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A rank's file. What it cannot take is said once, on the console, and lost.
struct LogFile {
    file: Mutex<File>,
    has_failed: AtomicBool,
    console: Console,
}

impl<'a> MakeWriter<'a> for LogFile {
    type Writer = &'a Self;

    fn make_writer(&'a self) -> Self::Writer {
        self
    }
}

impl Write for &LogFile {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if let Err(error) = self.file.lock().write_all(line)
            && !self.has_failed.swap(true, Ordering::Relaxed)
        {
            // Not through `tracing`, which would come back here.
            self.console.println(&format!(
                "phalanx: warning: a rank's log cannot be written: {error}; lines are lost"
            ));
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::ffi::OsStringExt;
    use std::sync::Arc;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use phalanx::WorldSize;

    use super::*;

    /// What a console got.
    #[derive(Clone, Default)]
    struct Shown(Arc<Mutex<Vec<u8>>>);

    impl Write for Shown {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Shown {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().clone()).unwrap()
        }
    }

    #[test]
    fn rank_0_s_logs_are_shown_and_every_rank_s_are_in_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let shown = Shown::default();
        let console = Console::lines(shown.clone());
        for rank in WorldSize::new(2).unwrap().ranks() {
            let subscriber = subscriber(rank, folder.path(), &console).unwrap();
            tracing::subscriber::with_default(subscriber, || {
                tracing::info!("rank {rank} is ready");
                tracing::debug!("nobody wants this");
            });
        }
        let file = |rank| std::fs::read_to_string(folder.path().join(format!("rank-{rank}.log"))).unwrap();
        for text in [file(0), shown.text()] {
            assert!(
                text.contains("INFO") && text.ends_with("rank 0 is ready\n") && text.lines().count() == 1,
                "{text}"
            );
        }
        assert!(file(1).ends_with("rank 1 is ready\n") && file(1).lines().count() == 1, "{}", file(1));
    }

    #[test]
    fn a_log_on_a_full_disk_is_said_once() {
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/dev/full", folder.path().join("rank-0.log")).unwrap();
        let shown = Shown::default();
        let subscriber = subscriber(Rank::MAIN, folder.path(), &Console::lines(shown.clone())).unwrap();
        tracing::subscriber::with_default(subscriber, || {
            (0..5).for_each(|step| tracing::info!("step {step}"))
        });
        let text = shown.text();
        assert_eq!(
            text.matches("a rank's log cannot be written: No space left on device").count(),
            1,
            "{text}"
        );
        assert_eq!(text.matches("INFO").count(), 5, "{text}");
    }

    #[test]
    fn a_pipe_in_the_place_of_a_log_is_refused_and_holds_nobody_up() {
        let (reader, writer) = io::pipe().unwrap();
        // Whoever opens it to write would wait for a reader.
        let folder = tempfile::tempdir().unwrap();
        let pipe = format!("/proc/self/fd/{}", writer.as_raw_fd());
        std::os::unix::fs::symlink(pipe, folder.path().join("rank-0.log")).unwrap();
        drop(reader);
        let (tell, told) = channel();
        let path = folder.path().to_owned();
        std::thread::spawn(move || {
            tell.send(subscriber(Rank::MAIN, &path, &Console::lines(io::sink())).err())
        });
        let error = told.recv_timeout(Duration::from_secs(60)).unwrap().unwrap();
        let said = error.to_string();
        assert!(
            said.contains("rank-0.log cannot be opened") && said.contains("a pipe or a socket"),
            "{said}"
        );
        assert!(error.remedy().is_some(), "{said}");
    }

    #[test]
    fn a_filter_that_makes_no_sense_is_an_error_that_names_the_variable() {
        let error = wanted(Some("phalanx=loud".into())).unwrap_err().to_string();
        assert!(
            error.contains("RUST_LOG=\"phalanx=loud\"") && error.contains("warn,phalanx=debug"),
            "{error}"
        );
        // It would name a part of a program that there is not.
        let error = wanted(Some(OsString::from_vec(b"phalan\xff".to_vec()))).unwrap_err().to_string();
        assert!(error.contains("is no filter of logs"), "{error}");
        assert_eq!(wanted(Some(OsString::new())).unwrap().default_level(), Some(LevelFilter::INFO));
        assert_eq!(wanted(Some("warn".into())).unwrap().default_level(), Some(LevelFilter::WARN));
    }
}
