//! Checks that all ranks train the same model. They compare before anything is averaged, so that a difference is an error
//! with a name in it on every rank, and neither a hang nor a wrong result.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::ParameterSpec;
use super::sync::alloc_or_abort;
use crate::buffer::Buffer;
use crate::collective::ReduceOp;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::group::{Communicator, ProcessGroup};
use crate::hash::fnv1a;
use crate::rank::Rank;
use crate::world_size::WorldSize;

/// The most ranks of a list that an error shows.
const SHOWN: usize = 16;
/// The most that one rank may make another take for a description: specs of about a million parameters.
const MAX_MESSAGE_BYTES: usize = 64 << 20;

/// The properties that must be the same on every rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Contract {
    pub(crate) parameters: Vec<ParameterSpec>,
    pub(crate) options: Vec<(String, String)>,
    /// The kind of device on which the model is, if its adapter knows several.
    pub(crate) device: Option<String>,
    pub(crate) plan_hash: u64,
}

/// Where a rank differs from rank 0, with that rank's side.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum Difference {
    /// The parameter at an index, which one of the two may not have.
    Parameter {
        index: u32,
        count: u32,
        mine: Option<ParameterSpec>,
    },
    /// An option, which one of the two may not have.
    Option {
        name: String,
        mine: Option<String>,
    },
    Device {
        mine: Option<String>,
    },
    Plan {
        hash: u64,
    },
}

/// Compares `mine` with rank 0's; every rank returns the same verdict.
pub(crate) fn verify(group: &dyn Communicator, mine: &Contract) -> Result<()> {
    if group.world_size().get() == 1 {
        return Ok(());
    }
    let main: Contract = share(group, Rank::MAIN, mine)?;
    let difference = mine.difference(&main);
    let Some(rank) = first_rank(group, difference.is_some())? else { return Ok(()) };
    // Ranks without a difference do not use what they give here: only the named rank's message travels.
    let found = share(group, rank, &difference)?;
    match found {
        Some(found) => Err(found.describe(&main, rank)),
        None => Err(Error::malformed(format!("rank {rank} differs from rank 0 but does not say how"))),
    }
}

/// Compares names, shapes and types of all tensors of a model, frozen ones and buffers too, with rank 0's.
///
/// [`Reducer::new`](super::Reducer::new) looks at the parameters that need a gradient; an adapter calls this first, so
/// that [`broadcast_state`](super::broadcast_state) finds the same tensors on every rank.
///
/// # Errors
/// On every rank, if one differs: it names the first tensor that does, with both sides.
pub fn verify_state(group: &dyn Communicator, tensors: Vec<ParameterSpec>) -> Result<()> {
    verify(group, &Contract { parameters: tensors, options: Vec::new(), device: None, plan_hash: 0 })
}

/// As [`verify_state`], and compares the kind of `device` on which the models are, such as `cuda`: an adapter whose gradients come
/// from one kind in another order than from another calls it, or they would be averaged with others' gradients. It also compares the adapter's own
/// `options`, by name.
///
/// # Errors
/// On every rank, if a kind, a tensor or an option differs, with both sides. A difference in kind is named before one in tensors, of
/// which it may be the cause.
pub fn verify_state_on(
    group: &dyn Communicator,
    device: &str,
    tensors: Vec<ParameterSpec>,
    options: &[(&str, String)],
) -> Result<()> {
    let options = options.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
    verify(group, &Contract { parameters: tensors, options, device: Some(device.to_owned()), plan_hash: 0 })
}

/// Compares `mine`, which describes this rank's `what`, such as its optimizer, with rank 0's.
///
/// # Errors
/// On every rank, if one differs: it shows both sides.
pub fn verify_description(group: &dyn Communicator, what: &str, mine: &str) -> Result<()> {
    if group.world_size().get() == 1 {
        return Ok(());
    }
    let mine = mine.to_owned();
    let main: String = share(group, Rank::MAIN, &mine)?;
    let Some(rank) = first_rank(group, mine != main)? else { return Ok(()) };
    let theirs = share(group, rank, &mine)?;
    Err(Error::mismatch(format!("the {what} of rank 0 is {main}, and that of rank {rank} is {theirs}"))
        .with_peer(rank)
        .with_remedy("give every rank the same"))
}

/// Checks that every rank has the same `hash`.
pub(crate) fn verify_hash(group: &dyn Communicator, what: &str, hash: u64) -> Result<()> {
    // The smallest of the numbers, and of their complements: they belong together only if all are the same.
    let number = hash as i64;
    let smallest = all_reduce_min(group, &[number, !number])?;
    if smallest.first() == Some(&number) && smallest.get(1) == Some(&!number) {
        Ok(())
    } else {
        Err(Error::mismatch(format!("the ranks computed different {what}"))
            .with_remedy("do all ranks run the same program?"))
    }
}

/// Compares the smaller groups of all ranks, of which `part` is this rank's: each of its ranks must be in the same one, or they wait for each other.
pub(super) fn verify_parts(group: &dyn Communicator, part: &ProcessGroup) -> Result<()> {
    let Some(whole) = group.process_group() else { return Ok(()) };
    let members = members_of(part, &whole);
    let digest = fnv1a(encode(&members)?) as i64;
    let mut digests = alloc_or_abort(group, DType::I64, group.world_size().count())?;
    let own = digests.as_mut_slice::<i64>()?.get_mut(group.rank().index());
    own.into_iter().for_each(|own| *own = digest);
    let digests = group.all_gather_v_in_place_async(digests, &vec![1; group.world_size().count()])?.wait()?;
    let digests = digests.as_slice::<i64>()?;
    let is_elsewhere =
        |member: &Option<u32>| member.is_none_or(|rank| digests.get(rank as usize) != Some(&digest));
    let other = members.iter().copied().find(is_elsewhere);
    let Some(rank) = first_rank(group, other.is_some())? else { return Ok(()) };
    // Ranks without a difference do not use what they give here.
    let (theirs, other) = share(group, rank, &(members.clone(), other.flatten()))?;
    let other = match other {
        Some(other) => {
            let other = group.world_size().rank(other)?;
            format!("that of rank {other} has {}", listed(&share(group, other, &members)?))
        }
        None => "one of them is not in the group of the Ddp".to_owned(),
    };
    let cause = format!("the smaller group of rank {rank} has {}, and {other}", listed(&theirs));
    Err(Error::mismatch(cause).with_peer(rank).with_remedy(
        "make the smaller groups by the same calls on every rank, such as one ProcessGroup::split",
    ))
}

/// The ranks of `part` as those of `whole`, with None for what is not in that. Nothing is known of a group that was made otherwise, and one rank
/// alone waits for nobody.
fn members_of(part: &ProcessGroup, whole: &ProcessGroup) -> Vec<Option<u32>> {
    if part.world_size() == WorldSize::ONE || !part.is_related(whole) {
        return Vec::new();
    }
    let place = |rank: Rank| part.global_rank(rank).ok().and_then(|global| whole.group_rank(global));
    part.world_size().ranks().map(|rank| place(rank).map(Rank::get)).collect()
}

/// The first of these ranks, for people.
fn listed(members: &[Option<u32>]) -> String {
    if members.is_empty() {
        return "no other rank".to_owned();
    }
    let name = |member: &Option<u32>| member.map_or_else(|| "another".to_owned(), |rank| rank.to_string());
    let names: Vec<String> = members.iter().take(SHOWN).map(name).collect();
    let more = if members.len() > SHOWN { ", .." } else { "" };
    format!("the ranks {}{more}", names.join(", "))
}

/// The value of rank `root`, on every rank.
pub(crate) fn share<T: Serialize + DeserializeOwned>(
    group: &dyn Communicator,
    root: Rank,
    mine: &T,
) -> Result<T> {
    let buffer = broadcast_bytes(group, root, &encode(mine)?, MAX_MESSAGE_BYTES)?;
    postcard::from_bytes(buffer.as_bytes()).map_err(|error| {
        Error::malformed(format!("rank {root} sent a malformed description")).with_source(error)
    })
}

/// The bytes of rank `root`, on every rank: at most `limit`, and of a length that only the root knows. Every rank gives some:
/// among ranks that may run out of data, another one may speak for the root.
///
/// # Errors
/// If the root has more than `limit` bytes, there is no memory for them, or the group fails.
pub fn broadcast_bytes(group: &dyn Communicator, root: Rank, mine: &[u8], limit: usize) -> Result<Buffer> {
    let length = group.broadcast_async(Buffer::from_slice(&[mine.len() as i64]), root)?.wait()?;
    let length = length.as_slice::<i64>()?.first().copied().unwrap_or(-1);
    let length = usize::try_from(length).ok().filter(|&length| length <= limit).ok_or_else(|| {
        Error::protocol(format!("rank {root} announced {length} B; at most {limit} are taken"))
            .with_peer(root)
            .with_remedy(
                "start all processes of the job with the same build, and give the same model to each",
            )
    })?;
    let mut buffer = alloc_or_abort(group, DType::U8, length)?;
    if mine.len() == length {
        buffer.as_bytes_mut().copy_from_slice(mine);
    }
    group.broadcast_async(buffer, root)?.wait()
}

fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    postcard::to_stdvec(value)
        .map_err(|error| Error::invalid_argument("the model cannot be described").with_source(error))
}

/// The lowest rank that says `yes`.
fn first_rank(group: &dyn Communicator, yes: bool) -> Result<Option<Rank>> {
    let mine = if yes { i64::from(group.rank().get()) } else { i64::MAX };
    let first = all_reduce_min(group, &[mine])?.first().copied().unwrap_or(i64::MAX);
    if first == i64::MAX {
        return Ok(None);
    }
    let first = u32::try_from(first).map_err(|_| Error::malformed(format!("{first} is no rank")))?;
    group.world_size().rank(first).map(Some)
}

/// The smallest and the largest of all ranks' numbers. Ranks without data in a `join` have none.
pub(super) fn extremes(group: &dyn Communicator, number: u64) -> Result<(u64, u64)> {
    let number = i64::try_from(number).unwrap_or(i64::MAX);
    let smallest = all_reduce_min(group, &[number, !number])?;
    let [least, most] = smallest[..] else { return Ok((0, 0)) };
    Ok((least.unsigned_abs(), (!most).unsigned_abs()))
}

fn all_reduce_min(group: &dyn Communicator, numbers: &[i64]) -> Result<Vec<i64>> {
    let buffer = group.all_reduce_async(Buffer::from_slice(numbers), ReduceOp::Min)?.wait()?;
    Ok(buffer.as_slice::<i64>()?.to_vec())
}

impl Contract {
    fn difference(&self, main: &Self) -> Option<Difference> {
        if self.device != main.device {
            return Some(Difference::Device { mine: self.device.clone() });
        }
        let count = self.parameters.len().max(main.parameters.len());
        let index = (0..count).find(|&index| self.parameters.get(index) != main.parameters.get(index));
        if let Some(index) = index {
            return Some(Difference::Parameter {
                index: u32::try_from(index).unwrap_or(u32::MAX),
                count: u32::try_from(self.parameters.len()).unwrap_or(u32::MAX),
                mine: self.parameters.get(index).cloned(),
            });
        }
        let theirs = || main.options.iter().find(|option| !self.options.contains(option));
        let option = self.options.iter().find(|option| !main.options.contains(option)).or_else(theirs);
        if let Some((name, _)) = option {
            return Some(Difference::Option { name: name.clone(), mine: self.option(name) });
        }
        (self.plan_hash != main.plan_hash).then_some(Difference::Plan { hash: self.plan_hash })
    }

    /// What the option `name` is, for people: an adapter may give several of one name.
    fn option(&self, name: &str) -> Option<String> {
        let values = self.options.iter().filter(|(other, _)| other == name);
        let values: Vec<&str> = values.map(|(_, value)| value.as_str()).collect();
        (!values.is_empty()).then(|| values.join(", "))
    }
}

impl Difference {
    /// The error, with rank 0's side beside that of `rank`.
    fn describe(&self, main: &Contract, rank: Rank) -> Error {
        let cause = match self {
            Self::Parameter { index, count, mine } => {
                let theirs = main.parameters.get(*index as usize);
                let side = |spec: Option<&ParameterSpec>, count: usize| match spec {
                    Some(spec) => spec.to_string(),
                    None => format!("none (it has {count} parameters)"),
                };
                format!(
                    "the models differ: parameter {index} is {} on rank 0 and {} on rank {rank}",
                    side(theirs, main.parameters.len()),
                    side(mine.as_ref(), *count as usize),
                )
            }
            Self::Option { name, mine } => {
                let theirs = main.option(name);
                let [theirs, mine] = [&theirs, mine].map(|value| value.as_deref().unwrap_or("unset"));
                let cause = format!("the option {name} is {theirs} on rank 0 and {mine} on rank {rank}");
                return Error::mismatch(cause).with_peer(rank).with_remedy(
                    "give every rank the same model, options and hook, and load the same state on every rank, or on none",
                );
            }
            Self::Device { mine } => {
                let kind = |device: &Option<String>| device.clone().unwrap_or_else(|| "unknown".to_owned());
                let cause = format!(
                    "the models are on different kinds of devices: {} on rank 0 and {} on rank {rank}",
                    kind(&main.device),
                    kind(mine)
                );
                return Error::mismatch(cause)
                    .with_peer(rank)
                    .with_remedy("choose the same kind of device on every rank");
            }
            Self::Plan { hash } => format!(
                "the bucket plans differ: {:016x} on rank 0 and {hash:016x} on rank {rank}",
                main.plan_hash
            ),
        };
        Error::mismatch(cause).with_peer(rank).with_remedy("build the same model on every rank")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Fabric, run};

    #[test]
    fn an_option_that_one_rank_lacks_is_named_whichever_rank_that_is() {
        for (without, said) in
            [(0, "unset on rank 0 and 3 on rank 1"), (2, "3 on rank 0 and unset on rank 2")]
        {
            let errors = run(3, Fabric::InProcess, |group| {
                let options = [("period", "3".to_owned())];
                let given = &options[usize::from(group.rank().index() == without)..];
                verify_state_on(&group, "cpu", Vec::new(), given).unwrap_err().to_string()
            });
            assert!(
                errors.iter().all(|error| error.contains(&format!("the option period is {said}"))),
                "{errors:?}"
            );
        }
    }

    #[test]
    fn of_two_options_with_one_name_both_are_compared() {
        let errors = run(2, Fabric::InProcess, |group| {
            let second = if group.rank().is_main() { "gelu" } else { "relu" };
            let options = ["tanh", second].map(|value| ("activation", value.to_owned()));
            verify_state_on(&group, "cpu", Vec::new(), &options).unwrap_err().to_string()
        });
        let said = "the option activation is tanh, gelu on rank 0 and tanh, relu on rank 1";
        assert!(errors.iter().all(|error| error.contains(said)), "{errors:?}");
    }

    #[test]
    fn a_description_that_differs_on_one_rank_is_shown_on_all() {
        for different in [None, Some(2)] {
            let errors = run(3, Fabric::InProcess, |group| {
                let mine = if different == Some(group.rank().index()) { "SGD 0.8" } else { "SGD 0.9" };
                verify_description(&group, "optimizer", mine).err().map(|error| error.to_string())
            });
            let said = "the optimizer of rank 0 is SGD 0.9, and that of rank 2 is SGD 0.8";
            for error in errors {
                assert_eq!(error.is_some(), different.is_some());
                assert!(error.is_none_or(|error| error.contains(said)));
            }
        }
    }
}
