//! The status line's text: pure.

use std::fmt;

use phalanx::launch::{ElasticHosts, Event, Failure};

/// The state of the job that the status line shows.
#[derive(Debug, Default)]
pub(crate) struct Status {
    nodes: u32,
    node: u32,
    workers: u32,
    /// Workers of this node that run.
    running: u32,
    restarts: u32,
    max_restarts: u32,
    replacements: u32,
    max_replacements: u32,
    last_failure: Option<String>,
}

impl Status {
    /// Takes an event into account; returns whether the line has changed.
    pub(crate) fn observe(&mut self, event: &Event<'_>) -> bool {
        match *event {
            Event::Starting { restarts, max_restarts, world_size, node, nodes } => {
                (self.restarts, self.max_restarts) = (restarts, max_restarts);
                (self.nodes, self.node, self.workers, self.running) = (nodes, node, world_size.get(), 0);
            }
            Event::Started { .. } => {
                self.running += 1;
                // Hosts may be added to an elastic job.
                self.workers = self.workers.max(self.running);
            }
            Event::Exited { .. } => self.running = self.running.saturating_sub(1),
            Event::Lost { failure, replacements, max_replacements, .. } => {
                (self.replacements, self.max_replacements) = (replacements, max_replacements);
                self.last_failure = Some(brief(failure));
            }
            Event::Regrouping { left: Some(failure) } => self.last_failure = Some(failure.to_string()),
            Event::Restarting { failure } => self.last_failure = Some(brief(failure)),
            _ => return false,
        }
        true
    }
}

fn brief(failure: &Failure) -> String {
    format!("rank {} on {}, {}", failure.rank, failure.host, failure.exit)
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("phalanx: ")?;
        if self.nodes > 1 {
            write!(f, "node {} of {}, ", self.node, self.nodes)?;
        }
        let s = if self.workers == 1 { "" } else { "s" };
        write!(f, "{} worker{s}, {} running here", self.workers, self.running)?;
        if self.max_restarts > 0 {
            write!(f, ", {} of {} restarts", self.restarts, self.max_restarts)?;
        }
        match self.max_replacements {
            0 => {}
            ElasticHosts::NO_LIMIT => write!(f, ", {} replacements", self.replacements)?,
            limit => write!(f, ", {} of {limit} replacements", self.replacements)?,
        }
        self.last_failure.as_ref().map_or(Ok(()), |failure| write!(f, "; last failure: {failure}"))
    }
}

#[cfg(test)]
mod tests {
    use phalanx::launch::Exit;
    use phalanx::{Rank, WorldSize};

    use super::*;

    #[test]
    fn it_says_what_runs() {
        let mut status = Status::default();
        let world_size = WorldSize::new(4).unwrap();
        let start =
            |restarts, nodes| Event::Starting { restarts, max_restarts: 3, world_size, node: 0, nodes };
        assert!(status.observe(&start(1, 2)));
        assert!(status.observe(&Event::Started { rank: Rank::MAIN, local_rank: 0, pid: 7 }));
        assert!(!status.observe(&Event::Killing));
        assert_eq!(status.to_string(), "phalanx: node 0 of 2, 4 workers, 1 running here, 1 of 3 restarts");
    }

    #[test]
    fn workers_that_are_added_are_counted() {
        let mut status = Status::default();
        let world_size = WorldSize::ONE;
        status.observe(&Event::Starting { restarts: 0, max_restarts: 0, world_size, node: 0, nodes: 1 });
        for pid in [7, 8] {
            status.observe(&Event::Started { rank: Rank::MAIN, local_rank: 0, pid });
        }
        assert_eq!(status.to_string(), "phalanx: 2 workers, 2 running here");
        status.observe(&Event::Exited { rank: Rank::MAIN, pid: 7, exit: Exit::Lost });
        assert_eq!(status.to_string(), "phalanx: 2 workers, 1 running here");
    }

    #[test]
    fn it_shows_no_limit_where_there_is_none() {
        let mut status = Status { replacements: 2, max_replacements: 5, ..Status::default() };
        assert!(status.to_string().ends_with(", 2 of 5 replacements"), "{status}");
        status.max_replacements = ElasticHosts::NO_LIMIT;
        assert!(status.to_string().ends_with(", 2 replacements"), "{status}");
    }
}
