//! The order in which the ranks write a checkpoint: pure.
//!
//! [`WriteOrder`] gives one [`Operation`] after another, and is told whether each has succeeded. What it guarantees, whichever of them
//! fails, and wherever a process is killed:
//!
//! - A checkpoint has its final name only after all its files, its manifest, and the names of both are on the disk.
//! - Before each operation that changes what others see, the owner looks whether it [still owns](Operation::is_owners) the folder.
//! - Each rank takes part in every exchange that the others wait for, also after a failure of its own.
//! - What was begun and cannot be completed is removed, once no other rank adds to it.
//!
//! ```text
//! alone                 leader                            member
//! make the folder       make the folder
//!                       announce its name  ------------>  hear its name, find the folder
//! write its files       write its files                   write its files
//!                                                         sync the folder
//!                       gather what all have  <---------  gather
//!                       see the files of the others
//! write the manifest    write the manifest
//! sync the folder       sync the folder
//! rename it             rename it
//! sync the parent       sync the parent
//!                       conclude  --------------------->  conclude
//! ```

/// A rank's part in a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It writes the whole checkpoint.
    Alone,
    /// It writes its part, and the manifest of a sharded checkpoint.
    Leader,
    /// It writes its part of a sharded checkpoint.
    Member,
}

/// What a rank does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Make the folder in which the checkpoint is written.
    MakeFolder,
    /// Give the members the folder's name, or the failure; a member hears it.
    Announce,
    /// Wait until the folder is to be seen.
    FindFolder,
    /// Write the file of this number to the disk: its contents, and not yet its name.
    WriteFile(usize),
    /// Give the leader what this rank has written, or its failure; the leader hears it.
    Gather,
    /// Wait until all files are to be seen, and make the manifest.
    SeeFiles,
    /// Write the manifest to the disk.
    WriteManifest,
    /// Write the names in the folder to the disk.
    SyncFolder,
    /// Give the folder its final name.
    Rename,
    /// Write the final name to the disk.
    SyncParent,
    /// Remove what was begun. It may fail: the next write removes the rest.
    GiveUp,
    /// Give the members the result; a member hears it.
    Conclude,
}

impl Operation {
    /// Whether only the owner of the folder may do it: it looks right before.
    pub fn is_owners(self) -> bool {
        matches!(self, Self::MakeFolder | Self::WriteFile(_) | Self::WriteManifest | Self::Rename)
    }
}

/// What has become of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It has been done.
    Done,
    /// It has failed. Of an exchange: it was done, and has told of another rank's failure.
    Failed,
    /// The exchange itself has failed: the ranks hear nothing of each other any more.
    Lost,
}

/// A write in progress.
#[derive(Clone, Debug)]
pub struct WriteOrder {
    role: Role,
    /// How many files this rank writes.
    files: usize,
    next: Option<Operation>,
    failed: bool,
    /// Whether all ranks will take part in [`Operation::Conclude`].
    concludes: bool,
}

impl WriteOrder {
    /// A write of which nothing has been done. `files`: how many this rank writes, besides the manifest.
    pub fn new(role: Role, files: usize) -> Self {
        let first = if role == Role::Member { Operation::Announce } else { Operation::MakeFolder };
        Self { role, files, next: Some(first), failed: false, concludes: false }
    }

    /// The operation to do now; None if the write is over.
    pub fn next(&self) -> Option<Operation> {
        self.next
    }

    /// What has become of the operation of [`next`](Self::next). That of [`Operation::GiveUp`] does not matter.
    pub fn done(&mut self, outcome: Outcome) {
        let Some(now) = self.next else { return };
        self.failed |= outcome != Outcome::Done && now != Operation::GiveUp;
        if now == Operation::Announce {
            self.concludes = !self.failed;
        }
        self.concludes &= outcome != Outcome::Lost;
        self.next = if self.failed { self.after_failure(now) } else { self.after(now) };
    }

    fn after(&self, now: Operation) -> Option<Operation> {
        let (alone, member) = (self.role == Role::Alone, self.role == Role::Member);
        Some(match now {
            Operation::MakeFolder if alone => self.file(0),
            Operation::MakeFolder => Operation::Announce,
            Operation::Announce if member => Operation::FindFolder,
            Operation::Announce | Operation::FindFolder => self.file(0),
            Operation::WriteFile(number) => self.file(number + 1),
            Operation::Gather if member => Operation::Conclude,
            Operation::Gather => Operation::SeeFiles,
            Operation::SeeFiles => Operation::WriteManifest,
            Operation::WriteManifest => Operation::SyncFolder,
            Operation::SyncFolder if member => Operation::Gather,
            Operation::SyncFolder => Operation::Rename,
            Operation::Rename => Operation::SyncParent,
            Operation::SyncParent if alone => return None,
            Operation::SyncParent => Operation::Conclude,
            Operation::GiveUp | Operation::Conclude => return None,
        })
    }

    /// The file of this number, or what comes after the files.
    fn file(&self, number: usize) -> Operation {
        match self.role {
            _ if number < self.files => Operation::WriteFile(number),
            Role::Alone => Operation::WriteManifest,
            Role::Leader => Operation::Gather,
            Role::Member => Operation::SyncFolder,
        }
    }

    fn after_failure(&self, now: Operation) -> Option<Operation> {
        let conclude = self.concludes.then_some(Operation::Conclude);
        match (self.role, now) {
            (_, Operation::Conclude) | (Role::Member, Operation::Announce) => None,
            (Role::Member, Operation::Gather) => conclude,
            // The leader waits for the result.
            (Role::Member, _) => Some(Operation::Gather),
            (Role::Leader, Operation::MakeFolder) => Some(Operation::Announce),
            // The members add to the folder until they have reported.
            (Role::Leader, Operation::WriteFile(_)) => Some(Operation::Gather),
            // It has its name, and stays.
            (_, Operation::SyncParent | Operation::GiveUp) => conclude,
            (_, _) => Some(Operation::GiveUp),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILES: usize = 2;

    /// Whether all ranks take part in it.
    fn is_exchange(operation: Operation) -> bool {
        matches!(operation, Operation::Announce | Operation::Gather | Operation::Conclude)
    }

    /// All that a rank does if its operation of number `fault` ends so.
    fn play(role: Role, fault: usize, outcome: Outcome) -> Vec<(Operation, Outcome)> {
        let (mut write, mut played) = (WriteOrder::new(role, FILES), Vec::new());
        while let Some(operation) = write.next() {
            let outcome = if played.len() == fault { outcome } else { Outcome::Done };
            played.push((operation, outcome));
            assert!(played.len() < 50, "{played:?}");
            write.done(outcome);
        }
        played
    }

    /// Each role with a fault at each of its operations, of each kind.
    fn all() -> impl Iterator<Item = (Role, Vec<(Operation, Outcome)>)> {
        [Role::Alone, Role::Leader, Role::Member].into_iter().flat_map(|role| {
            [Outcome::Failed, Outcome::Lost].into_iter().flat_map(move |outcome| {
                let most = play(role, usize::MAX, Outcome::Done).len();
                (0..=most).map(move |fault| (role, play(role, fault, outcome)))
            })
        })
    }

    #[test]
    fn a_checkpoint_has_its_name_only_when_all_of_it_is_on_the_disk() {
        let mut renamed = 0;
        for (role, played) in all() {
            let at = |wanted| played.iter().position(|(operation, _)| *operation == wanted);
            let Some(rename) = at(Operation::Rename) else { continue };
            renamed += 1;
            let before = &played[..rename];
            assert!(before.iter().all(|(_, outcome)| *outcome == Outcome::Done), "{played:?}");
            let sync = at(Operation::SyncFolder).unwrap();
            for file in (0..FILES).map(Operation::WriteFile).chain([Operation::WriteManifest]) {
                assert!(at(file).is_some_and(|written| written < sync), "{played:?}");
            }
            assert!(sync < rename, "{played:?}");
            if role == Role::Leader {
                // All have reported, and their files are there.
                assert!(at(Operation::Gather) < at(Operation::SeeFiles), "{played:?}");
                assert!(at(Operation::SeeFiles) < at(Operation::WriteManifest), "{played:?}");
            }
            // It stays, whatever comes later.
            let after = &played[rename..];
            let gives_up = after.iter().any(|(operation, _)| *operation == Operation::GiveUp);
            assert_eq!(gives_up, played[rename].1 != Outcome::Done, "{played:?}");
        }
        // Alone: from the rename on, and with no fault; twice, for both kinds of fault. The leader concludes, besides.
        assert_eq!(renamed, 2 * 3 + 2 * 4);
    }

    #[test]
    fn what_cannot_be_completed_is_removed_once_and_by_its_owner() {
        for (role, played) in all() {
            let gives_up = played.iter().filter(|(operation, _)| *operation == Operation::GiveUp).count();
            let renamed = played.contains(&(Operation::Rename, Outcome::Done));
            let expected = usize::from(role != Role::Member && !renamed);
            assert_eq!(gives_up, expected, "{role:?} {played:?}");
        }
    }

    /// Lets a leader and two members write together. `fault`: a rank, the number of its operation, and whether it is an exchange that
    /// is lost. Returns whether each rank has learnt of a failure, or that there was no such operation.
    fn together(fault: (usize, usize)) -> Option<[bool; 3]> {
        let roles = [Role::Leader, Role::Member, Role::Member];
        let mut ranks = roles.map(|role| WriteOrder::new(role, FILES));
        let (mut counts, mut met) = ([0; 3], false);
        let mut leaders_failure = false;
        loop {
            // Each goes on until it must wait for the others.
            for (rank, write) in ranks.iter_mut().enumerate() {
                while let Some(operation) = write.next().filter(|operation| !is_exchange(*operation)) {
                    let fails = fault == (rank, counts[rank]);
                    met |= fails;
                    counts[rank] += 1;
                    write.done(if fails { Outcome::Failed } else { Outcome::Done });
                    leaders_failure |= rank == 0 && fails && operation != Operation::GiveUp;
                }
            }
            let waits = ranks.each_ref().map(WriteOrder::next);
            assert!(waits.iter().all(|wait| *wait == waits[0]), "one waits alone: {waits:?} with {fault:?}");
            let Some(exchange) = waits[0] else { break };
            let anyone = ranks.iter().any(|write| write.failed);
            for (rank, write) in ranks.iter_mut().enumerate() {
                let fails = match exchange {
                    Operation::Announce => leaders_failure,
                    Operation::Gather => rank == 0 && anyone,
                    _ => anyone,
                };
                write.done(if fails { Outcome::Failed } else { Outcome::Done });
            }
        }
        met.then(|| ranks.map(|write| write.failed))
    }

    #[test]
    fn no_rank_waits_alone_and_all_learn_of_a_failure() {
        for rank in 0..3 {
            let faults = (0..50).map_while(|number| together((rank, number)));
            let learnt: Vec<[bool; 3]> = faults.collect();
            assert!(learnt.len() > FILES + 1, "rank {rank}: {learnt:?}");
            assert!(learnt.iter().all(|learnt| *learnt == [true; 3]), "rank {rank}: {learnt:?}");
        }
    }

    #[test]
    fn a_rank_that_hears_nothing_any_more_waits_for_nothing_more() {
        for (role, played) in all() {
            let lost = played
                .iter()
                .position(|(operation, outcome)| is_exchange(*operation) && *outcome == Outcome::Lost);
            let Some(lost) = lost else { continue };
            let later = &played[lost + 1..];
            assert!(later.iter().all(|(operation, _)| !is_exchange(*operation)), "{role:?} {played:?}");
        }
    }
}
