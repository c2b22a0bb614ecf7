//! Carries out what is ready: the same operations on the same sizes, in the same order, on every rank.

use std::collections::HashMap;
use std::ops::Range;

use phalanx::{Buffer, DType, Error, ProcessGroup, Rank, ReduceOp, Result, TransportKind};

use crate::adasum;
use crate::elements::{all_reduce, fill_neutral};
use crate::engine::Submission;
use crate::handle::{Completer, Outcome};
use crate::tensor::Tensor;
use crate::topology::numbered_among;
use phalanx::adapter::elements::{convert, scale};
use phalanx_proto::horovod::controller::{Fused, Member};
use phalanx_proto::horovod::message::Response;
use phalanx_proto::horovod::reduction::{Op, Reduction};
use phalanx_proto::horovod::request::{Kind, Request};

/// A tensor that is larger than the fusion buffer, and travels in another type, passes through it in pieces of at least
/// this many bytes.
const LEAST_PIECE: usize = 1 << 20;
/// Among ranks that share memory, batches pass through the fusion buffer in pieces of at most this many bytes: what is copied into a
/// piece is still in the cache when it is combined and copied back.
const PIECE: usize = 2 << 20;
/// The bytes of a fusion buffer are a multiple of this.
const PAGE: usize = 4096;

/// The tensors that this rank has in flight, by name.
#[derive(Default)]
pub(crate) struct Works(HashMap<String, Work>);

struct Work {
    tensors: Vec<Tensor>,
    /// Of an alltoall: how many rows go to each rank.
    splits: Vec<usize>,
    /// How many of them are still to be reduced.
    left: usize,
    done: Completer,
}

impl Works {
    pub fn add(&mut self, submission: Submission) {
        let Submission { request, tensors, splits, done, .. } = submission;
        let work = Work { left: tensors.len(), tensors, splits, done };
        self.0.insert(request.name, work);
    }

    pub fn fail_all(&mut self, cause: &Error) {
        for (_, work) in self.0.drain() {
            work.done.complete(Err(cause.clone()));
        }
    }

    /// The tensors of a name; none if this rank has joined. Its handle stays here until [`end`](Self::end), so that it gets the
    /// cause of whatever happens in between.
    fn take_tensors(&mut self, name: &str) -> Option<Vec<Tensor>> {
        self.0.get_mut(name).map(|work| std::mem::take(&mut work.tensors))
    }

    /// How many rows of an alltoall go to each rank; empty if this rank has joined.
    fn take_splits(&mut self, name: &str) -> Vec<usize> {
        self.0.get_mut(name).map(|work| std::mem::take(&mut work.splits)).unwrap_or_default()
    }

    pub fn end(&mut self, name: &str, outcome: Result<Outcome>) {
        if let Some(work) = self.0.remove(name) {
            work.done.complete(outcome);
        }
    }

    /// The tensor of a batch's member; none if this rank has joined.
    fn tensor(&mut self, ready: &[Response], member: Member) -> Option<&mut Tensor> {
        self.0.get_mut(&ready[member.response].request.name)?.tensors.get_mut(member.part)
    }

    /// A member is reduced. Its name is done with the last one.
    fn reduced(&mut self, ready: &[Response], member: Member) {
        let name = &ready[member.response].request.name;
        let Some(work) = self.0.get_mut(name) else { return };
        work.left -= 1;
        if work.left == 0
            && let Some(work) = self.0.remove(name)
        {
            work.done.complete(Ok(Outcome::of(work.tensors)));
        }
    }
}

pub(crate) struct Executor {
    group: ProcessGroup,
    /// The most bytes that go through the fusion buffer at once.
    piece: usize,
    memory: FusionMemory,
}

impl Executor {
    pub fn new(group: ProcessGroup, threshold: usize) -> Self {
        let piece = match group.transport() {
            Some(TransportKind::SharedMemory) => PIECE,
            _ => usize::MAX,
        };
        let memory = FusionMemory { group: group.clone(), most: threshold, buffers: Vec::new() };
        Self { memory, piece, group }
    }

    pub fn set_threshold(&mut self, threshold: usize) {
        self.memory.most = threshold;
        self.memory.make_room(0);
    }

    /// The bytes of the fusion buffer now.
    pub fn fusion_bytes(&self) -> usize {
        self.memory.held()
    }

    /// Reduces the tensors of a batch.
    pub fn reduce(&mut self, ready: &[Response], fused: &Fused, works: &mut Works) -> Result<()> {
        if fused.is_in_place() {
            self.reduce_in_place(ready, fused, works)?;
        } else {
            self.reduce_fused(ready, fused, works)?;
        }
        fused.members.iter().for_each(|member| works.reduced(ready, *member));
        Ok(())
    }

    fn reduce_in_place(&mut self, ready: &[Response], fused: &Fused, works: &mut Works) -> Result<()> {
        let [member] = fused.members[..] else { return Ok(()) };
        let part = &ready[member.response].request.parts[member.part];
        let (dtype, lengths) = (fused.dtype, [fused.elements]);
        let (op, (before, after)) = (fused.reduction.op, fused.reduction.factors(dtype));
        match works.tensor(ready, member) {
            Some(tensor) => {
                let data = tensor.as_bytes_mut();
                scale(dtype, data, before)?;
                self.combine(op, dtype, data, &lengths)?;
                scale(dtype, data, after)
            }
            None => {
                let mut neutral = Tensor::zeroed(dtype, part.dims())?;
                fill_neutral(dtype, neutral.as_bytes_mut(), op)?;
                self.combine(op, dtype, neutral.as_bytes_mut(), &lengths)
            }
        }
    }

    /// Through the fusion buffer, in pieces.
    fn reduce_fused(&mut self, ready: &[Response], fused: &Fused, works: &mut Works) -> Result<()> {
        let Fused { members, wire, reduction, .. } = fused;
        let lengths: Vec<usize> = members
            .iter()
            .map(|member| ready[member.response].request.parts[member.part].elements())
            .collect();
        // An Adasum is of whole tensors.
        let most = match reduction.op {
            Op::Adasum => usize::MAX,
            _ => self.piece.min(self.memory.most.max(LEAST_PIECE)) / wire.size(),
        };
        for piece in pieces(&lengths, most) {
            let places: Vec<_> =
                piece.iter().map(|(index, place)| (members[*index], place.clone())).collect();
            let lengths: Vec<usize> = piece.iter().map(|(_, place)| place.len()).collect();
            self.reduce_piece(ready, fused, &places, &lengths, works)?;
        }
        Ok(())
    }

    fn reduce_piece(
        &mut self,
        ready: &[Response],
        fused: &Fused,
        places: &[(Member, Range<usize>)],
        lengths: &[usize],
        works: &mut Works,
    ) -> Result<()> {
        let Fused { dtype, wire, reduction, .. } = fused;
        let (op, (before, after)) = (reduction.op, reduction.factors(*dtype));
        let bytes = lengths.iter().sum::<usize>() * wire.size();
        let mut buffer = self.memory.take(bytes)?;
        let (used, padding) = buffer.as_bytes_mut().split_at_mut(bytes);
        padding.fill(0);
        let mut rest = used;
        for (member, place) in places {
            let (target, others) = rest.split_at_mut(place.len() * wire.size());
            rest = others;
            match works.tensor(ready, *member) {
                Some(tensor) => {
                    let source =
                        &mut tensor.as_bytes_mut()[place.start * dtype.size()..place.end * dtype.size()];
                    // Before it loses precision.
                    scale(*dtype, source, before)?;
                    convert(*dtype, source, *wire, target)?;
                }
                None => fill_neutral(*wire, target, op)?,
            }
        }
        self.combine(op, *wire, buffer.as_bytes_mut(), lengths)?;
        let mut rest = &buffer.as_bytes()[..bytes];
        for (member, place) in places {
            let (source, others) = rest.split_at(place.len() * wire.size());
            rest = others;
            if let Some(tensor) = works.tensor(ready, *member) {
                let target = &mut tensor.as_bytes_mut()[place.start * dtype.size()..place.end * dtype.size()];
                convert(*wire, source, *dtype, target)?;
                scale(*dtype, target, after)?;
            }
        }
        self.memory.give_back(buffer);
        Ok(())
    }

    /// Combines all of `data`, or for an Adasum the tensors of `lengths` in it.
    fn combine(&self, op: Op, dtype: DType, data: &mut [u8], lengths: &[usize]) -> Result<()> {
        match op.reduce_op() {
            Some(op) => all_reduce(&self.group, dtype, data, op),
            None => {
                let bytes = lengths.iter().sum::<usize>() * dtype.size();
                adasum::all_reduce(&self.group, dtype, &mut data[..bytes], lengths)
            }
        }
    }

    /// Carries out any other response.
    pub fn single(&mut self, response: &Response, works: &mut Works) -> Result<()> {
        let name = &response.request.name;
        if let Some(error) = &response.error {
            let remedy =
                "every rank must submit the same under a name; see the shapes, types and options of both";
            let error = format!("{error}{}", numbered_among(&self.group));
            works.end(name, Err(Error::mismatch(error).with_remedy(remedy)));
            return Ok(());
        }
        let outcome = match (&response.request.kind, works.take_tensors(name)) {
            (Kind::Reducescatter(reduction), own) => self.reducescatter(response, own, *reduction)?,
            (kind, own) => {
                let tensors = own.map_or_else(|| neutral(&response.request), Ok)?;
                match kind {
                    Kind::Allgather => Outcome::of(self.allgather(response, &tensors)?),
                    Kind::Broadcast { root } => Outcome::of(self.broadcast(tensors, Rank::new(*root))?),
                    Kind::Alltoall => self.alltoall(&response.request, &tensors, works.take_splits(name))?,
                    // Of no tensors.
                    Kind::Allreduce(_) | Kind::Reducescatter(_) | Kind::Barrier => Outcome::of(tensors),
                }
            }
        };
        works.end(name, Ok(outcome));
        Ok(())
    }

    fn allgather(&self, response: &Response, tensors: &[Tensor]) -> Result<Vec<Tensor>> {
        let parts = response.request.parts.iter().enumerate().zip(tensors);
        let gathered = parts.map(|((index, part), tensor)| {
            let row = part.row() * part.dtype.size();
            let rows: Vec<usize> = response.rows.iter().map(|rows| rows[index] as usize).collect();
            let mut shape = part.dims();
            shape[0] = rows.iter().sum();
            let mut all = Tensor::zeroed(part.dtype, shape)?;
            let counts: Vec<usize> = rows.iter().map(|rows| rows * row).collect();
            self.group.all_gather_v(tensor.as_bytes(), all.as_bytes_mut(), &counts)?;
            Ok(all)
        });
        gathered.collect()
    }

    fn broadcast(&self, mut tensors: Vec<Tensor>, root: Rank) -> Result<Vec<Tensor>> {
        tensors.iter_mut().try_for_each(|tensor| self.group.broadcast(tensor.as_bytes_mut(), root))?;
        Ok(tensors)
    }

    /// The ranks first tell each other how many rows come. `splits` are those that this rank sends.
    fn alltoall(&self, request: &Request, tensors: &[Tensor], mut splits: Vec<usize>) -> Result<Outcome> {
        let (Some(part), Some(tensor)) = (request.parts.first(), tensors.first()) else {
            return Ok(Outcome::default());
        };
        let (size, row) = (self.group.world_size().count(), part.row() * part.dtype.size());
        // A rank that has joined sends none.
        splits.resize(size, 0);
        let sent: Vec<usize> = splits.iter().map(|rows| rows * row).collect();
        let own: Vec<i64> = splits.iter().map(|rows| *rows as i64).collect();
        let mut coming = vec![0i64; size];
        self.group.all_to_all(&own, &mut coming)?;
        let splits = coming.iter().map(|rows| usize::try_from(*rows).ok()).collect::<Option<Vec<usize>>>();
        // So many that the bytes of all of them can be counted.
        let splits = splits.filter(|splits| {
            let rows = splits.iter().try_fold(0usize, |sum, rows| sum.checked_add(*rows));
            let bytes = rows.and_then(|rows| rows.checked_mul(row));
            bytes.is_some_and(|bytes| bytes <= isize::MAX as usize)
        });
        let Some(splits) = splits else {
            return Err(Error::malformed(format!(
                "{:?}: the ranks send {coming:?} rows to this one, which cannot be",
                request.name
            )));
        };
        let mut shape = part.dims();
        shape[0] = splits.iter().sum();
        let mut received = Tensor::zeroed(part.dtype, shape)?;
        let counts: Vec<usize> = splits.iter().map(|rows| rows * row).collect();
        self.group.all_to_all_v(tensor.as_bytes(), &sent, received.as_bytes_mut(), &counts)?;
        Ok(Outcome { tensors: vec![received], splits, ..Outcome::default() })
    }

    /// The rows are divided as evenly as possible; the first ranks have one more if they cannot be.
    fn reducescatter(
        &self,
        response: &Response,
        own: Option<Vec<Tensor>>,
        reduction: Reduction,
    ) -> Result<Outcome> {
        let (rank, size) = (self.group.rank().index(), self.group.world_size().count());
        let is_absent = own.is_none();
        let tensors = own.map_or_else(|| neutral(&response.request), Ok)?;
        let Reduction { op, compression, .. } = reduction;
        let op = op.reduce_op().unwrap_or(ReduceOp::Sum);
        let scattered = tensors.into_iter().map(|mut tensor| {
            let (dtype, mut shape) = (tensor.dtype(), tensor.shape().to_vec());
            let (wire, row) = (compression.travels_as(dtype), shape[1..].iter().product::<usize>());
            let (before, after) = reduction.factors(dtype);
            let rows: Vec<usize> =
                (0..size).map(|rank| shape[0] / size + usize::from(rank < shape[0] % size)).collect();
            let counts: Vec<usize> = rows.iter().map(|rows| rows * row).collect();
            let mut buffer = self.group.alloc(wire, tensor.len())?;
            // What changes nothing is not multiplied.
            scale(dtype, tensor.as_bytes_mut(), if is_absent { 1.0 } else { before })?;
            convert(dtype, tensor.as_bytes(), wire, buffer.as_bytes_mut())?;
            drop(tensor);
            let buffer = self.group.reduce_scatter_v_async(buffer, &counts, op)?.wait()?;
            shape[0] = rows[rank];
            let mut shard = Tensor::zeroed(dtype, shape)?;
            let start = counts[..rank].iter().sum::<usize>() * wire.size();
            let place = start..start + counts[rank] * wire.size();
            convert(wire, &buffer.as_bytes()[place], dtype, shard.as_bytes_mut())?;
            scale(dtype, shard.as_bytes_mut(), after)?;
            Ok(shard)
        });
        Ok(Outcome::of(scattered.collect::<Result<_>>()?))
    }
}

/// Divides elements of tensors with these lengths, one behind the other, into pieces of at most `most`: which elements of which
/// tensors are in each.
fn pieces(lengths: &[usize], most: usize) -> Vec<Vec<(usize, Range<usize>)>> {
    let (mut pieces, mut piece, mut room) = (Vec::new(), Vec::new(), most);
    for (index, length) in lengths.iter().enumerate() {
        let mut start = 0;
        while start < *length {
            if room == 0 {
                pieces.push(std::mem::take(&mut piece));
                room = most;
            }
            let end = start + (length - start).min(room);
            room -= end - start;
            piece.push((index, start..end));
            start = end;
        }
    }
    if !piece.is_empty() {
        pieces.push(piece);
    }
    pieces
}

/// What a rank that has joined brings: no rows, or neutral elements.
fn neutral(request: &Request) -> Result<Vec<Tensor>> {
    let tensors = request.parts.iter().map(|part| {
        let mut shape = part.dims();
        if matches!(request.kind, Kind::Allgather | Kind::Alltoall) {
            shape[0] = 0;
        }
        let mut tensor = Tensor::zeroed(part.dtype, shape)?;
        if let Kind::Reducescatter(reduction) = &request.kind {
            fill_neutral(part.dtype, tensor.as_bytes_mut(), reduction.op)?;
        }
        Ok(tensor)
    });
    tensors.collect()
}

/// The fusion buffer: registered memory of the group in which batches are combined without a copy by the transport.
///
/// A collective works on whole registered buffers, so there is one for each size of batch that has come up, as long as all
/// together have no more bytes than the fusion threshold. Sizes are rounded up by at most an eighth, so that few of them come up.
struct FusionMemory {
    group: ProcessGroup,
    most: usize,
    /// The last one was used last.
    buffers: Vec<Buffer>,
}

impl FusionMemory {
    /// At least `bytes`, and as many on every rank, with whatever is in them.
    fn take(&mut self, bytes: usize) -> Result<Buffer> {
        let size = rounded(bytes, self.most);
        if let Some(index) = self.buffers.iter().position(|buffer| buffer.as_bytes().len() == size) {
            return Ok(self.buffers.remove(index));
        }
        self.make_room(size);
        self.group.alloc(DType::U8, size)
    }

    fn give_back(&mut self, buffer: Buffer) {
        self.buffers.push(buffer);
        self.make_room(0);
    }

    /// Frees what was not used for the longest time, until there is room for `bytes`.
    fn make_room(&mut self, bytes: usize) {
        while !self.buffers.is_empty() && self.held() + bytes > self.most {
            self.buffers.remove(0);
        }
    }

    fn held(&self) -> usize {
        self.buffers.iter().map(|buffer| buffer.as_bytes().len()).sum()
    }
}

/// The size of the buffer for `bytes`: whole pages, with at most an eighth left over.
fn rounded(bytes: usize, most: usize) -> usize {
    let step = (bytes.max(1).next_power_of_two() / 16).max(PAGE);
    let rounded = bytes.max(1).next_multiple_of(step);
    if bytes <= most && rounded > most { most.next_multiple_of(8) } else { rounded }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_full_but_for_the_last_one() {
        let all = pieces(&[3, 0, 5, 1], 4);
        assert_eq!(all, [vec![(0, 0..3), (2, 0..1)], vec![(2, 1..5)], vec![(3, 0..1)]]);
        assert_eq!(pieces(&[3, 5], usize::MAX), [[(0, 0..3), (1, 0..5)]]);
        assert!(pieces(&[0, 0], 4).is_empty());
    }

    #[test]
    fn few_sizes_come_up_and_little_is_left_over() {
        let most = 64 << 20;
        let sizes: std::collections::BTreeSet<usize> =
            (1..=most).step_by(997).map(|bytes| rounded(bytes, most)).collect();
        assert!(sizes.len() < 150, "{}", sizes.len());
        for bytes in [1, 4096, 4097, 70_000, 1 << 20, (1 << 20) + 1, most - 1, most] {
            let size = rounded(bytes, most);
            assert!(size >= bytes && size <= most && size - bytes < (bytes / 8).max(PAGE), "{bytes} {size}");
        }
        assert_eq!(rounded(1000, 1001), 1008, "a small threshold");
    }

    #[test]
    fn fusion_holds_no_more_than_its_threshold() {
        let mut memory =
            FusionMemory { group: ProcessGroup::alone().unwrap(), most: 100_000, buffers: Vec::new() };
        for bytes in [10_000, 50_000, 99_000, 10_000, 20_000, 70_000] {
            let buffer = memory.take(bytes).unwrap();
            assert!(memory.held() + buffer.as_bytes().len() <= 100_000 + PAGE);
            memory.give_back(buffer);
            assert!(memory.held() <= 100_000 + PAGE);
        }
        let before = memory.take(70_000).unwrap();
        let place = before.as_bytes().as_ptr();
        memory.give_back(before);
        assert_eq!(memory.take(70_000).unwrap().as_bytes().as_ptr(), place, "the same memory again");
    }
}
