//! The window of a launcher's lines: so much may be on the way to the command, which says when it has taken some.
//!
//! Lines, reports and instructions share one pipe. If the command read nothing while nobody reads its own output (a pager), a failure on
//! another host would wait behind lines. So the command reads at any time, and a launcher that has filled its window leaves its workers'
//! output in their pipes. The command then keeps no more than the windows of all hosts, and what a pipe holds of each worker.

use std::sync::Arc;

use parking_lot::Mutex;

/// The size of the window, in bytes: at a round trip of 100 ms between the hosts it lets 2.5 MB of lines pass in a second.
const WINDOW: usize = 256 * 1024;
/// The command tells a launcher of so much at a time.
pub(super) const ENOUGH_TAKEN: usize = WINDOW / 2;

/// The window, on the launcher's side.
#[derive(Clone, Debug, Default)]
pub(super) struct Window {
    filled: Arc<Mutex<usize>>,
}

impl Window {
    /// A line is sent.
    pub(super) fn fill(&self, room: usize) {
        let mut filled = self.filled.lock();
        *filled = filled.saturating_add(room);
    }

    /// The command has taken lines.
    pub(super) fn free(&self, room: usize) {
        let mut filled = self.filled.lock();
        *filled = filled.saturating_sub(room);
    }

    /// Whether lines may be sent.
    pub(super) fn is_open(&self) -> bool {
        *self.filled.lock() < WINDOW
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_window_opens_again_with_what_the_command_says_that_it_has_taken() {
        let window = Window::default();
        let lines = [WINDOW / 3 + 1; 3];
        for room in lines {
            assert!(window.is_open());
            window.fill(room);
        }
        assert!(!window.is_open());
        // The command has taken all by now, and says so: it never keeps so much for itself that no line comes any more.
        assert!(lines.iter().sum::<usize>() >= ENOUGH_TAKEN);
        window.free(ENOUGH_TAKEN);
        assert!(window.is_open());
        window.free(usize::MAX);
        assert!(window.is_open());
    }
}
