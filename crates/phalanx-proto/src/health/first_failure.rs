//! The one failure of a group: the first that is reported, for good.

use crate::error::Error;
use crate::rank::Rank;

/// What a rank knows of its group's end: the first cause of a failure, whether the peers have been told it, and who has left.
#[derive(Debug)]
pub struct FirstFailure {
    cause: Option<Error>,
    is_announced: bool,
    left: Vec<bool>,
}

impl FirstFailure {
    /// A healthy group of so many ranks.
    pub fn new(ranks: usize) -> Self {
        Self { cause: None, is_announced: false, left: vec![false; ranks] }
    }

    /// Keeps `error` if it is the first. Returns whether it is: then the peers must be told it, and [`announced`](Self::announced) be
    /// called. Later ones are consequences, or come too late: the group has its cause.
    pub fn report(&mut self, error: &Error) -> bool {
        let is_first = self.cause.is_none();
        if is_first {
            self.cause = Some(error.clone());
        }
        is_first
    }

    /// The peers have been told the cause.
    pub fn announced(&mut self) {
        self.is_announced = true;
    }

    /// The cause, whether the peers know it or not.
    pub fn cause(&self) -> Option<&Error> {
        self.cause.as_ref()
    }

    /// Whether there is a cause that the peers have not been told yet. Until then nobody may return it: a program that exits because of
    /// it would be the first that they miss, and they would blame it.
    pub fn is_pending(&self) -> bool {
        self.cause.is_some() && !self.is_announced
    }

    /// Whether the peers have been told a cause.
    pub fn is_announced(&self) -> bool {
        self.is_announced
    }

    /// `peer` has sent a goodbye: what it has sent stays valid, and nothing more will come.
    pub fn left(&mut self, peer: Rank) {
        if let Some(left) = self.left.get_mut(peer.index()) {
            *left = true;
        }
    }

    /// Whether `peer` has sent a goodbye.
    pub fn has_left(&self, peer: Rank) -> bool {
        self.left.get(peer.index()).copied().unwrap_or(false)
    }

    /// Whether enough is known of why `error` happened: the peers have been told a cause, or the peer that it blames has left.
    pub fn explains(&self, error: &Error) -> bool {
        self.is_announced || error.peer().is_some_and(|peer| self.has_left(peer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_cause_stays_and_is_pending_until_it_is_told() {
        let mut failure = FirstFailure::new(3);
        assert!(failure.cause().is_none() && !failure.is_pending());
        assert!(failure.report(&Error::timeout("first")));
        assert!(failure.is_pending() && !failure.is_announced());
        assert!(!failure.report(&Error::timeout("second")));
        failure.announced();
        assert!(!failure.is_pending() && failure.is_announced());
        assert!(failure.cause().unwrap().to_string().contains("first"));
    }

    #[test]
    fn a_goodbye_explains_an_error_about_its_rank_alone() {
        let mut failure = FirstFailure::new(3);
        let about = |rank| Error::timeout("late").with_peer(Rank::new(rank));
        failure.left(Rank::new(1));
        failure.left(Rank::new(9)); // Of no rank: a peer may send anything.
        assert!(failure.explains(&about(1)) && !failure.explains(&about(2)));
        assert!(!failure.has_left(Rank::new(9)) && !failure.explains(&Error::timeout("late")));
        failure.report(&about(2));
        assert!(!failure.explains(&about(2)), "the peers do not know it yet");
        failure.announced();
        assert!(failure.explains(&about(2)));
    }
}
