//! How many calls, and how many bytes, may be in flight from one rank to another. Caller and callee count in the same way; pure.

use super::Limits;
use crate::wire::rpc::DEPTHS;

/// The calls in flight in one direction, by depth.
#[derive(Debug)]
pub(super) struct Window {
    limits: Limits,
    loads: [Load; DEPTHS],
}

#[derive(Clone, Copy, Debug, Default)]
struct Load {
    calls: u32,
    bytes: u64,
}

impl Window {
    pub(super) fn new(limits: Limits) -> Self {
        Self { limits, loads: [Load::default(); DEPTHS] }
    }

    /// Takes a place for a call of `bytes` at `depth`; false if there is none now. A call alone may be of any length.
    pub(super) fn enter(&mut self, depth: u8, bytes: u64) -> bool {
        let Some(load) = self.loads.get_mut(usize::from(depth)) else { return false };
        let fits = load.bytes.saturating_add(bytes) <= self.limits.bytes || load.calls == 0;
        if load.calls >= self.limits.calls || !fits {
            return false;
        }
        load.calls += 1;
        load.bytes += bytes;
        true
    }

    /// Gives back the place of a call that has been answered.
    pub(super) fn leave(&mut self, depth: u8, bytes: u64) {
        if let Some(load) = self.loads.get_mut(usize::from(depth)) {
            load.calls = load.calls.saturating_sub(1);
            load.bytes = load.bytes.saturating_sub(bytes);
        }
    }

    /// How many calls there may be at all depths together.
    pub(super) fn most_calls(&self) -> usize {
        (self.limits.calls as usize).saturating_mul(DEPTHS)
    }

    /// Whether nothing is in flight.
    pub(super) fn is_empty(&self) -> bool {
        self.loads.iter().all(|load| load.calls == 0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: Limits = Limits { calls: 3, bytes: 100 };

    #[test]
    fn calls_and_bytes_are_bounded_at_each_depth_by_itself() {
        let mut window = Window::new(LIMITS);
        assert!(window.enter(0, 40) && window.enter(0, 60) && !window.enter(0, 1));
        assert!(window.enter(1, 100), "a nested call does not wait for those around it");
        window.leave(0, 40);
        assert!(window.enter(0, 40));
        window.leave(0, 40);
        window.leave(0, 60);
        assert!(window.enter(0, 1000), "a call alone may be longer");
        assert!(!window.enter(0, 0) && !window.enter(DEPTHS as u8, 0));
        let mut window = Window::new(LIMITS);
        assert!((0..3).all(|_| window.enter(0, 0)) && !window.enter(0, 0));
    }

    proptest! {
        /// The callee leaves before it answers, and the caller when the answer has come: whatever is under way, a call that
        /// the caller may send is one that the callee admits.
        #[test]
        fn the_callee_admits_what_the_caller_sends(steps in prop::collection::vec((0u8..3, 0u8..4, 0u64..60), 0..200)) {
            let (mut caller, mut callee) = (Window::new(LIMITS), Window::new(LIMITS));
            let (mut sent, mut served, mut answered) = (Vec::new(), Vec::new(), Vec::new());
            for (step, depth, bytes) in steps {
                match step {
                    0 if caller.enter(depth, bytes) => sent.push((depth, bytes)),
                    1 if !sent.is_empty() => {
                        let (depth, bytes) = sent.remove(0);
                        prop_assert!(callee.enter(depth, bytes));
                        served.push((depth, bytes));
                    }
                    2 if !served.is_empty() => {
                        let (depth, bytes) = served.swap_remove(usize::from(depth) % served.len());
                        callee.leave(depth, bytes);
                        answered.push((depth, bytes));
                    }
                    _ => for (depth, bytes) in answered.drain(..) {
                        caller.leave(depth, bytes);
                    },
                }
            }
        }
    }
}
