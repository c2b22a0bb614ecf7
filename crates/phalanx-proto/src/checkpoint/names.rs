//! The names in a folder of checkpoints, and what each means for the process that writes there: pure.
//!
//! ```text
//! 00000012-step-1200                 checkpoint 12, complete
//! .writing-00000014-by-00000002      checkpoint 14, which the process with claim 2 writes
//! .removing-00000010-by-00000002     checkpoint 10, which that process removes
//! .owner-00000002                    claim 2: see `claims`
//! ```

/// The prefix of a checkpoint that is being written.
const WRITING: &str = ".writing-";
/// The prefix of a checkpoint that is being removed.
const REMOVING: &str = ".removing-";
/// Between the number of the checkpoint and the number of the claim that works on it.
const BY: &str = "-by-";
/// Between number and step.
const STEP: &str = "-step-";
/// The prefix of the number of a claim.
const OWNER: &str = ".owner-";

/// The largest number, of a checkpoint and of a claim: no job makes so many.
const MAX_NUMBER: u64 = u64::MAX / 2;

/// The name of a complete checkpoint.
pub fn complete(number: u64, step: u64) -> String {
    format!("{number:08}{STEP}{step}")
}

/// The name of a checkpoint that the owner of `claim` writes.
pub fn writing(number: u64, claim: u64) -> String {
    format!("{WRITING}{number:08}{BY}{claim:08}")
}

/// The name of a checkpoint that the owner of `claim` removes.
pub fn removing(number: u64, claim: u64) -> String {
    format!("{REMOVING}{number:08}{BY}{claim:08}")
}

/// The name of a claim's file.
pub fn owner(claim: u64) -> String {
    format!("{OWNER}{claim:08}")
}

/// The number of a complete checkpoint's folder; None if this is not the name of one.
pub fn checkpoint_number(name: &str) -> Option<u64> {
    let (number, step) = name.split_once(STEP)?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !is_number(number) || !is_number(step) {
        return None;
    }
    number.parse().ok().filter(|number| *number <= MAX_NUMBER)
}

/// The number of the claim whose file has this name; None if this is not the name of one. Another way to write the number is none: no file
/// would be found under the name that the number has.
pub fn claim_number(name: &str) -> Option<u64> {
    let number = name.strip_prefix(OWNER)?.parse::<u64>().ok().filter(|number| *number < MAX_NUMBER)?;
    (owner(number) == name).then_some(number)
}

/// Whether this is the name of a checkpoint that is being written.
pub fn is_writing(name: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let numbers = name.strip_prefix(WRITING).and_then(|what| what.split_once(BY));
    numbers.is_some_and(|(number, claim)| is_number(number) && is_number(claim))
}

/// What an owner does with a folder that a writer has left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Leftover {
    /// Rename it to this name, and remove it: its writer, if it goes on, can add no further file.
    MoveAside(String),
    /// Remove it.
    Remove,
}

/// What the owner of `claim`, which writes nothing at the moment, does with the folder of this name; None if it is not a leftover
/// of this process or of an earlier owner.
pub fn leftover(name: &str, claim: u64) -> Option<Leftover> {
    let old = |what| claimed_by(what).is_some_and(|by| by <= claim);
    match (name.strip_prefix(WRITING), name.strip_prefix(REMOVING)) {
        (Some(what), _) if old(what) => Some(Leftover::MoveAside(format!("{REMOVING}{what}{BY}{claim:08}"))),
        (_, Some(what)) if old(what) => Some(Leftover::Remove),
        _ => None,
    }
}

/// The number of the claim that last worked on a folder of ours with this name, if the name has one.
fn claimed_by(what: &str) -> Option<u64> {
    let (_, claim) = what.rsplit_once(BY)?;
    what.split(BY).all(|number| number.parse::<u64>().is_ok()).then(|| claim.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_checkpoints_are_known_from_others() {
        assert_eq!(claimed_by("00000012-by-00000003"), Some(3));
        assert_eq!(claimed_by("00000012-by-00000003-by-00000004"), Some(4));
        for name in ["00000012", "a-by-00000003", "00000012-by-", "00000012-by-3-by-x"] {
            assert_eq!(claimed_by(name), None, "{name}");
        }
        assert_eq!(checkpoint_number("00000012-step-1200"), Some(12));
        assert_eq!(checkpoint_number("123456789-step-0"), Some(123_456_789));
        for name in [
            ".writing-00000012",
            "12",
            "-step-1",
            "12-step-",
            "+1-step-1",
            "1-step-1x",
            "99999999999999999999-step-1",
        ] {
            assert_eq!(checkpoint_number(name), None, "{name}");
        }
    }

    #[test]
    fn a_name_has_one_meaning() {
        assert_eq!(checkpoint_number(&complete(12, 1200)), Some(12));
        assert_eq!(claim_number(&owner(7)), Some(7));
        for name in [".owner-7", ".owner-000000007", ".owner-+0000007", ".owner-"] {
            assert_eq!(claim_number(name), None, "{name}");
        }
        for name in [complete(1, 2), owner(3), "manifest.json".to_owned()] {
            assert_eq!(leftover(&name, 9), None, "{name}");
        }
        for name in [writing(1, 2), removing(1, 2), "7".to_owned(), ".owner-x".to_owned()] {
            assert_eq!((checkpoint_number(&name), claim_number(&name)), (None, None), "{name}");
        }
    }

    #[test]
    fn a_checkpoint_that_is_being_written_has_no_other_name() {
        assert!(is_writing(&writing(12, 3)) && is_writing(&writing(u64::MAX, u64::MAX)));
        for name in [
            "",
            "..",
            "/",
            &complete(12, 1200),
            &removing(12, 3),
            ".writing-00000012",
            ".writing-00000012-by-",
            ".writing-00000012-by-00000003-by-00000004",
            ".writing-00000012-by-00000003/..",
            "../.writing-00000012-by-00000003",
        ] {
            assert!(!is_writing(name), "{name}");
        }
    }

    #[test]
    fn an_owner_touches_nothing_of_a_later_one() {
        let aside = ".removing-00000014-by-00000002-by-00000003".to_owned();
        assert_eq!(leftover(&writing(14, 2), 3), Some(Leftover::MoveAside(aside.clone())));
        assert_eq!(leftover(&aside, 3), Some(Leftover::Remove));
        assert_eq!(leftover(&aside, 2), None);
        assert_eq!(leftover(&writing(14, 3), 2), None);
        // Its own, from an earlier write.
        assert_eq!(leftover(&removing(10, 3), 3), Some(Leftover::Remove));
    }
}
