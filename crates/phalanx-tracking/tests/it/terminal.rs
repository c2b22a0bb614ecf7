//! The bar on a terminal.

use std::io;
use std::sync::Arc;

use indicatif::TermLike;
use parking_lot::Mutex;
use phalanx::testing::{Fabric, run};
use phalanx_tracking::{Console, Run, RunOptions, logs};

/// A terminal that keeps all that was drawn.
#[derive(Clone, Debug, Default)]
struct Screen(Arc<Mutex<String>>);

impl Screen {
    fn draw(&self, text: &str) -> io::Result<()> {
        self.0.lock().push_str(text);
        Ok(())
    }
}

impl TermLike for Screen {
    fn width(&self) -> u16 {
        80
    }

    fn move_cursor_up(&self, _n: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_down(&self, _n: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_right(&self, _n: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_left(&self, _n: usize) -> io::Result<()> {
        Ok(())
    }

    fn write_line(&self, line: &str) -> io::Result<()> {
        self.draw(line)?;
        self.draw("\n")
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        self.draw(text)
    }

    fn clear_line(&self) -> io::Result<()> {
        self.draw("\n")
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn one_bar_whatever_the_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let screens = [Screen::default(), Screen::default(), Screen::default()];
    run(3, Fabric::InProcess, |group| {
        let screen = screens[group.rank().index()].clone();
        let console = Console::terminal(Box::new(screen));
        let subscriber = logs::subscriber(group.rank(), folder.path(), &console).unwrap();
        let options = RunOptions::new(folder.path()).progress(&console, Some(200));
        let run = Run::start(&group, options).unwrap();
        tracing::subscriber::with_default(subscriber, || {
            for step in 0..200 {
                run.log_mean(step, "loss", group.rank().get()).unwrap();
            }
            tracing::info!("rank {} is done", group.rank());
        });
        run.finish().unwrap();
    });
    let [shown, others @ ..] = screens.map(|screen| screen.0.lock().clone());
    assert!(others.iter().all(String::is_empty), "{others:?}");
    let last = shown.lines().rfind(|line| line.contains("/200")).unwrap();
    assert!(last.contains("200/200") && last.contains("loss 1.000"), "{shown:?}");
    assert_eq!(shown.matches(" is done").count(), 1, "{shown:?}");
    let (log, bar) = (shown.find("rank 0 is done").unwrap(), shown.rfind("200/200").unwrap());
    assert!(log < bar, "the bar stays below what is logged: {shown:?}");
}
