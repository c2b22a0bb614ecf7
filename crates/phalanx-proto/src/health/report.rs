//! What users are told of a call that waits for long.

use crate::wire::control::{AwaitedState, LongWait, WaitReport};
use crate::wire::frame::Header;

/// The most characters of a peer's text that are shown.
const MAX_SHOWN: usize = 200;

impl LongWait {
    /// The call and how long it has waited, on the rank that `origin` describes.
    fn begins(&self, origin: &str) -> String {
        let Self { call: Header { call, sequence, .. }, seconds, .. } = self;
        format!("{origin} has waited for {seconds} s in {call} {sequence}")
    }
}

impl WaitReport {
    /// The report for the user of the rank that is awaited; None if there is nothing to say there.
    pub fn for_awaited(&self, rank: &str, origin: &str) -> Option<String> {
        let state = self.state.text()?;
        Some(format!("{} for this rank, {rank}: it {state}", self.wait.begins(origin)))
    }

    /// The report for the user of rank 0; `rank` describes the rank at the end of the chain of waits, `awaited` the one that
    /// `origin` waits for.
    pub fn for_main(&self, rank: &str, origin: &str, awaited: &str, is_one_host: bool) -> String {
        let begins = self.wait.begins(origin);
        match self.state.text() {
            Some(state) => format!("{begins} for {rank}: it {state}"),
            None if is_one_host => format!("{begins} for {awaited}, which is in this call too"),
            None => format!(
                "{begins} for {awaited}, which has made this call too: the data between them does not arrive. Does the network \
                 drop large packets? `phalanx doctor` between the hosts tells"
            ),
        }
    }
}

impl AwaitedState {
    /// What the awaited rank does instead; None if it is in the call.
    pub fn text(&self) -> Option<String> {
        let Self::NotCalled { last, running, elsewhere } = self else { return None };
        Some(match (running, elsewhere, last) {
            (Some(Header { call, sequence, .. }), ..) => format!("is in {call} {sequence}"),
            // A peer's text.
            (None, Some(elsewhere), _) => {
                let printable = elsewhere.chars().filter(|char| !char.is_control()).take(MAX_SHOWN);
                format!("is in {}", printable.collect::<String>())
            }
            (None, None, Some(last)) => format!("is in no call of this group; its last was {last}"),
            (None, None, None) => "has made no call of this group yet".to_owned(),
        })
    }
}
