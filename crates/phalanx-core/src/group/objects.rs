//! Collectives on values that can be serialised, with postcard. For settings, metrics and so on; tensors
//! have collectives of their own.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::ProcessGroup;
use super::engine::Engine;
use crate::buffer::Buffer;
use crate::caller::Caller;
use crate::collective::{Counts, Memory};
use crate::deadline::Timeout;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::wire::frame::Operation;
use crate::wire::{MAX_OBJECT_BYTES, object};

/// Sent in place of the length if a rank could not serialise its object: the others need an answer all the same.
const UNWRITTEN: i64 = -1;

impl ProcessGroup {
    /// Returns the root's `value` on every rank. The other ranks' value is not read, and may be `None`.
    ///
    /// ```
    /// use phalanx::{ProcessGroup, Rank};
    /// let group = ProcessGroup::alone()?;
    /// let path = group.rank().is_main().then(|| "run-7".to_owned());
    /// assert_eq!(group.broadcast_object(path.as_ref(), Rank::MAIN)?, "run-7");
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`broadcast`](Self::broadcast); if the root has no value, or cannot serialise it, or it is longer than
    /// [`MAX_OBJECT_BYTES`]; and if this rank cannot deserialise it.
    #[doc(alias = "broadcast_object_list")]
    pub fn broadcast_object<T: Serialize + DeserializeOwned>(
        &self,
        value: Option<&T>,
        root: Rank,
    ) -> Result<T> {
        let group = self.in_call(Caller::BroadcastObject);
        let root = self.member(root)?;
        let own = if self.rank() == root { written(value) } else { Ok(Vec::new()) };
        let bytes = group.on_queue(|engine, timeout| {
            let mut length = [announced(&own)];
            let call = group.call(Operation::Broadcast, DType::I64, 1).rooted_at(root);
            engine.collective(call, Memory::InPlace(bytemuck::cast_slice_mut(&mut length)), timeout)?;
            let length = checked(&length, |_| root).map_err(|error| own.clone().err().unwrap_or(error))?[0];
            let mut bytes = room(engine, length)?;
            if let Ok(own) = own.as_deref()
                && own.len() == length
            {
                bytes.as_bytes_mut().copy_from_slice(own);
            }
            let call = group.call(Operation::Broadcast, DType::U8, length).rooted_at(root);
            engine.collective(call, Memory::InPlace(bytes.as_bytes_mut()), timeout)?;
            Ok(bytes)
        })?;
        read(bytes.as_bytes(), root)
    }

    /// Returns all ranks' values on every rank, by rank.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather); if a rank cannot serialise its value, or all together are longer than
    /// [`MAX_OBJECT_BYTES`]; and if this rank cannot deserialise them.
    #[doc(alias = "allgather_object")]
    pub fn all_gather_object<T: Serialize + DeserializeOwned>(&self, value: &T) -> Result<Vec<T>> {
        let group = self.in_call(Caller::AllGatherObject);
        let own = written(Some(value));
        let (bytes, counts) = group.on_queue(|engine, timeout| {
            let counts = group.lengths(engine, &own, timeout)?;
            let mut bytes = room(engine, counts.total())?;
            let (input, output) = (own.as_deref().unwrap_or_default(), bytes.as_bytes_mut());
            let call = group.call(Operation::AllGatherV, DType::U8, counts.total());
            let memory = Memory::OutOfPlaceV { input, output, sent: &counts, received: &counts };
            engine.collective(call, memory, timeout)?;
            Ok((bytes, counts))
        })?;
        self.read_all(bytes.as_bytes(), &counts)
    }

    /// Returns all ranks' values on the root, by rank, and `None` on the others.
    ///
    /// # Errors
    /// As [`all_gather_object`](Self::all_gather_object), and if `root` is not a rank of this group.
    pub fn gather_object<T: Serialize + DeserializeOwned>(
        &self,
        value: &T,
        root: Rank,
    ) -> Result<Option<Vec<T>>> {
        let group = self.in_call(Caller::GatherObject);
        let root = self.member(root)?;
        let own = written(Some(value));
        let (bytes, counts) = group.on_queue(|engine, timeout| {
            // All ranks get the lengths, so that all refuse if they are too long.
            let counts = group.lengths(engine, &own, timeout)?;
            let received = if self.rank() == root { counts.clone() } else { self.nothing() };
            let sent = self.only(root, counts.of(self.rank().index()).len())?;
            let mut bytes = room(engine, received.total())?;
            let (input, output) = (own.as_deref().unwrap_or_default(), bytes.as_bytes_mut());
            let call = group.call(Operation::AllToAllV, DType::U8, 0);
            let memory = Memory::OutOfPlaceV { input, output, sent: &sent, received: &received };
            engine.collective(call, memory, timeout)?;
            Ok((bytes, counts))
        })?;
        if self.rank() == root { self.read_all(bytes.as_bytes(), &counts).map(Some) } else { Ok(None) }
    }

    /// Returns the r-th of the root's `values` on rank r. The other ranks' values are not read, and may be `None`.
    ///
    /// # Errors
    /// As [`broadcast_object`](Self::broadcast_object), and if the root does not have one value for each rank.
    #[doc(alias = "scatter_object_list")]
    pub fn scatter_object<T: Serialize + DeserializeOwned>(
        &self,
        values: Option<&[T]>,
        root: Rank,
    ) -> Result<T> {
        let group = self.in_call(Caller::ScatterObject);
        let (root, world) = (self.member(root)?, self.world_size());
        let own = match values {
            _ if self.rank() != root => Ok(Vec::new()),
            Some(values) if values.len() == world.count() => {
                values.iter().map(|value| written(Some(value))).collect()
            }
            values => {
                let brought = values.map_or(0, <[T]>::len);
                let cause = format!(
                    "scatter_object: the root, rank {root}, brings {brought} values for {world} ranks"
                );
                Err(Error::invalid_argument(cause)
                    .with_remedy("bring one value for each rank, in their order"))
            }
        };
        let bytes = group.on_queue(|engine, timeout| {
            let mut lengths = vec![UNWRITTEN; world.count()];
            if let Ok(own) = &own {
                lengths.iter_mut().zip(own).for_each(|(length, bytes)| *length = bytes.len() as i64);
            }
            let call = group.call(Operation::Broadcast, DType::I64, lengths.len()).rooted_at(root);
            engine.collective(call, Memory::InPlace(bytemuck::cast_slice_mut(&mut lengths)), timeout)?;
            let lengths = checked(&lengths, |_| root).map_err(|error| own.clone().err().unwrap_or(error))?;
            let sent = if self.rank() == root { Counts::new(&lengths, world)? } else { self.nothing() };
            let received = self.only(root, lengths[self.rank().index()])?;
            let (mut joined, mut bytes) = (room(engine, sent.total())?, room(engine, received.total())?);
            let mut rest = joined.as_bytes_mut();
            for object in own.iter().flatten() {
                let (here, behind) = rest.split_at_mut(object.len());
                here.copy_from_slice(object);
                rest = behind;
            }
            let (input, output) = (joined.as_bytes(), bytes.as_bytes_mut());
            let call = group.call(Operation::AllToAllV, DType::U8, 0);
            let memory = Memory::OutOfPlaceV { input, output, sent: &sent, received: &received };
            engine.collective(call, memory, timeout)?;
            Ok(bytes)
        })?;
        read(bytes.as_bytes(), root)
    }

    /// Runs the collectives of one call, without any other in between.
    fn on_queue<R>(&self, work: impl FnOnce(&mut Engine, &Timeout) -> Result<R>) -> Result<R> {
        self.begin()?;
        let timeout = self.operation_timeout();
        self.run_in_turn(&timeout, |engine| work(engine, &timeout))
    }

    /// The lengths of all ranks' objects.
    fn lengths(&self, engine: &mut Engine, own: &Result<Vec<u8>>, timeout: &Timeout) -> Result<Counts> {
        let mut lengths = vec![0i64; self.world_size().count()];
        let memory = Memory::OutOfPlace {
            input: &announced(own).to_ne_bytes(),
            output: bytemuck::cast_slice_mut(&mut lengths),
        };
        engine.collective(self.call(Operation::AllGather, DType::I64, 1), memory, timeout)?;
        let lengths = checked(&lengths, |index| Rank::new(index as u32))
            .map_err(|error| own.clone().err().unwrap_or(error))?;
        Counts::new(&lengths, self.world_size())
    }

    fn read_all<T: DeserializeOwned>(&self, bytes: &[u8], counts: &Counts) -> Result<Vec<T>> {
        self.world_size().ranks().map(|rank| read(&bytes[counts.of(rank.index())], rank)).collect()
    }

    /// No bytes for any rank.
    fn nothing(&self) -> Counts {
        Counts::even(0, self.world_size())
    }

    /// `length` bytes for `rank` only.
    fn only(&self, rank: Rank, length: usize) -> Result<Counts> {
        let mut counts = vec![0; self.world_size().count()];
        counts[rank.index()] = length;
        Counts::new(&counts, self.world_size())
    }
}

/// Memory for bytes that other ranks send or wait for. If there is none, the group fails: they would wait for this rank.
fn room(engine: &Engine, length: usize) -> Result<Buffer> {
    Buffer::try_zeroed(DType::U8, length).map_err(|error| engine.health().fail(error))
}

fn written<T: Serialize>(value: Option<&T>) -> Result<Vec<u8>> {
    let Some(value) = value else {
        return Err(Error::invalid_argument("broadcast_object: the root must bring a value"));
    };
    let mut bytes = Vec::new();
    object::write(value, &mut bytes, "the object")?;
    Ok(bytes)
}

fn announced(object: &Result<Vec<u8>>) -> i64 {
    object.as_ref().map_or(UNWRITTEN, |bytes| bytes.len() as i64)
}

/// The lengths, if all ranks' objects were serialised and are not too long.
fn checked(lengths: &[i64], origin: impl Fn(usize) -> Rank) -> Result<Vec<usize>> {
    let mut total = 0usize;
    lengths
        .iter()
        .enumerate()
        .map(|(index, length)| {
            let rank = origin(index);
            let length = usize::try_from(*length).map_err(|_| {
                let cause = format!("rank {rank} could not write its object");
                let remedy = format!("rank {rank}'s own error says why");
                Error::invalid_argument(cause).with_peer(rank).with_remedy(remedy)
            })?;
            total = total.saturating_add(length);
            if total > MAX_OBJECT_BYTES {
                return Err(Error::invalid_argument(format!(
                    "the object of rank {rank} takes {length} bytes, and with those before it {total}; a call may move \
                     {MAX_OBJECT_BYTES} (MAX_OBJECT_BYTES)"
                ))
                .with_peer(rank)
                .with_remedy("send large data as buffers"));
            }
            Ok(length)
        })
        .collect()
}

fn read<T: DeserializeOwned>(bytes: &[u8], origin: Rank) -> Result<T> {
    let unreadable = |cause: &str| {
        Error::mismatch(format!("the object of rank {origin} is not what this rank expects: {cause}"))
            .with_peer(origin)
            .with_remedy("every rank must call with the same type")
    };
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        Ok((_, rest)) => Err(unreadable(&format!("{} bytes are left over", rest.len()))),
        Err(error) => Err(unreadable(&error.to_string())),
    }
}

#[cfg(all(test, feature = "testing"))]
#[allow(clippy::unwrap_used, reason = "helpers of tests are tests")]
mod tests {
    use super::*;
    use crate::testing::{Fabric, run};

    #[test]
    fn a_rank_without_memory_for_objects_fails_the_group_and_nobody_waits_for_it() {
        for fabric in [Fabric::InProcess, Fabric::Tcp, Fabric::SharedMemory] {
            let errors = run(2, fabric, |group| match group.rank().is_main() {
                true => group.broadcast_object(Some(&7), Rank::MAIN).and_then(|_: i32| group.barrier()),
                // More bytes than processors can address.
                false => group.on_queue(|engine, _| room(engine, 1 << 60).map(drop)),
            });
            for error in errors.into_iter().map(Result::unwrap_err) {
                assert!(error.is_out_of_memory() && error.remedy().is_some(), "{fabric:?}: {error}");
            }
        }
    }
}
