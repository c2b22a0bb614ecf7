//! Objects of Python, which `phalanx_torch.objects` has pickled, on their way between ranks.
//!
//! PyTorch's functions for objects exchange lengths, and then bytes, padded to the longest. Here the first exchange is of a block from each rank, which
//! is as long on all: it has the length of what the rank sends, its *parcel*, and the beginning of it. Short parcels are in it as a whole, and
//! there is no second exchange. Of others the second one has all, by their exact lengths. All numbers are little-endian:
//!
//! ```text
//! block   length of the parcel (8) | of the longest that its sender has (8) | the parcel's beginning | zeros
//! parcel  form (4) | root (4) | number of objects (8) | the length of each (8 each) | their bytes
//! ```
//!
//! Every rank sees in the block whether there is a second exchange. A rank that cannot write its objects says so in its block, so that the others
//! do not wait for it. A message has a parcel alone.
//!
//! The calls have callers of their own: a rank that calls PyTorch's function of the same name gets an error that shows both.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use phalanx::{Caller, Error, ProcessGroup, Rank, Result};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyList};

use crate::errors::raised;
use crate::group::Group;

/// No call moves more, and no length of a peer's is believed to be more.
pub const MOST_BYTES: usize = 1 << 36;

const LENGTH: usize = size_of::<u64>();
const BLOCK_HEAD: usize = 2 * LENGTH;
const PARCEL_HEAD: usize = 2 * LENGTH;
/// The blocks of all ranks together are at most so long, with few ranks: as much as a collective in shared memory moves with one wait.
const BLOCKS_BYTES: usize = 32 << 10;
/// The length of the shortest and of the longest block.
const SHORTEST_BLOCK: usize = 512;
const LONGEST_BLOCK: usize = 8 << 10;
/// How many characters a block has of why a rank has no objects: as many as fit into the shortest one, whatever they are.
const CAUSE_CHARACTERS: usize = 100;
const NO_ROOT: u32 = u32::MAX;

/// The forms of a parcel, by the numbers that `phalanx_torch.objects` has for them: what `torch.save` has written, and in place of objects why there
/// are none. 0 is what `pickle` has written.
const SAVED: u32 = 1;
const FAILED: u32 = 2;

/// A call of this rank: what the ranks compare of it beside their collectives.
#[derive(Clone, Copy)]
struct Call {
    caller: Caller,
    form: u32,
    root: Option<Rank>,
}

/// The beginning of a parcel.
#[derive(Clone, Copy)]
struct Head {
    form: u32,
    root: Option<Rank>,
    objects: usize,
}

/// What a block says of the parcel that begins in it.
#[derive(Clone, Copy)]
struct Announced {
    length: usize,
    longest: usize,
    head: Head,
}

/// Objects that have come: where each lies within the bytes.
#[derive(Default)]
struct Received {
    bytes: Vec<u8>,
    objects: Vec<Range<usize>>,
}

#[pymethods]
impl Group {
    /// The pickled object of every rank, by rank.
    fn all_gather_object<'py>(
        &self,
        py: Python<'py>,
        object: PyBackedBytes,
        form: u32,
    ) -> PyResult<Bound<'py, PyList>> {
        let call = Call { caller: Caller::PickledAllGatherObject, form, root: None };
        self.exchange(py, call, move |group| all_gathered(group, call, &call.packed(&[object])))
    }

    /// The pickled object of every rank, by rank, on the root; nothing on the others.
    fn gather_object<'py>(
        &self,
        py: Python<'py>,
        object: PyBackedBytes,
        form: u32,
        root: u32,
    ) -> PyResult<Bound<'py, PyList>> {
        let root = Rank::new(root);
        let call = Call { caller: Caller::PickledGatherObject, form, root: Some(root) };
        self.exchange(py, call, move |group| gathered(group, call, root, &call.packed(&[object])))
    }

    /// The root's pickled `objects`, of which there are as many as `expected`, on every other rank; nothing on the root. Those of other ranks are not
    /// read.
    fn broadcast_objects<'py>(
        &self,
        py: Python<'py>,
        objects: Vec<PyBackedBytes>,
        expected: usize,
        form: u32,
        root: u32,
    ) -> PyResult<Bound<'py, PyList>> {
        let root = Rank::new(root);
        let call = Call { caller: Caller::PickledBroadcastObjectList, form, root: Some(root) };
        self.exchange(py, call, move |group| broadcasted(group, call, root, (objects.as_slice(), expected)))
    }

    /// This rank's one of the root's pickled `objects`, one for each rank; or in the form of a failure of one cause. Those of other ranks are not read.
    fn scatter_objects<'py>(
        &self,
        py: Python<'py>,
        objects: Vec<PyBackedBytes>,
        form: u32,
        root: u32,
    ) -> PyResult<Bound<'py, PyList>> {
        let root = Rank::new(root);
        if self.is_rank(root.get()) && form != FAILED {
            self.one_for_each("scatter_object_list: inputs", objects.len())?;
        }
        let call = Call { caller: Caller::PickledScatterObjectList, form, root: Some(root) };
        self.exchange(py, call, move |group| scattered(group, call, root, &objects))
    }

    /// Sends pickled objects to the rank `to`, and returns when they have been sent.
    fn send_objects(&self, py: Python<'_>, objects: Vec<PyBackedBytes>, form: u32, to: u32) -> PyResult<()> {
        let parcel = py.detach(|| packed(form, None, &objects));
        self.send_parcel(py, parcel, Rank::new(to))
    }

    /// Receives as many pickled objects as `expected` from the rank `from`, or from any if that is None. Returns from which, and the objects.
    fn recv_objects<'py>(
        &self,
        py: Python<'py>,
        from: Option<u32>,
        expected: usize,
        form: u32,
    ) -> PyResult<(u32, Bound<'py, PyList>)> {
        let (source, parcel) = self.recv_parcel(py, from.map(Rank::new))?;
        let group = self.open(None)?;
        let received = py.detach(|| opened(&group, source, parcel, (form, expected)));
        let received = received.map_err(|error| raised(py, &error))?;
        Ok((source.get(), received.list(py)?))
    }
}

impl Group {
    /// Carries out a call of objects, whose caller waits.
    fn exchange<'py>(
        &self,
        py: Python<'py>,
        call: Call,
        operation: impl FnOnce(&ProcessGroup) -> Result<Received> + Send + 'static,
    ) -> PyResult<Bound<'py, PyList>> {
        let found = Arc::new(Mutex::new(None));
        let result = found.clone();
        self.in_call(py, (None, true), Some(call.caller), move |group| {
            // Before anything is sent.
            if let Some(root) = call.root {
                group.world_size().rank(root.get())?;
            }
            *result.lock() = Some(operation(group)?);
            Ok(())
        })?;
        let received = found.lock().take();
        let received: Received =
            received.ok_or_else(|| PyRuntimeError::new_err("the call has ended without a result"))?;
        received.list(py)
    }
}

impl Call {
    fn packed(self, objects: &[impl AsRef<[u8]>]) -> Vec<u8> {
        packed(self.form, self.root, objects)
    }

    /// The error if a rank has no objects: all ranks get it, and the group goes on.
    fn failure(self, from: Rank, announced: Announced, block: &[u8]) -> Option<Error> {
        (announced.head.form == FAILED).then(|| {
            let parcel = block.get(BLOCK_HEAD..).unwrap_or_default();
            let parcel = parcel.get(..announced.length).unwrap_or_default();
            without_objects(self.caller.name(), from, parcel)
        })
    }

    /// The error if a rank has given other arguments, which ends the group.
    fn difference(self, own: Rank, from: Rank, theirs: Head) -> Option<Error> {
        let name = self.caller.name();
        let what = if theirs.form != self.form && self.form != FAILED {
            format!("{name}: rank {own} has {}, rank {from} has {}", form(self.form), form(theirs.form))
        } else if theirs.root != self.root {
            let root = |root: Option<Rank>| root.map_or("none".to_owned(), |root| root.to_string());
            let (ours, theirs) = (root(self.root), root(theirs.root));
            format!("{name}: of rank {own} the root is rank {ours}, of rank {from} rank {theirs}")
        } else {
            return None;
        };
        Some(
            Error::mismatch(what)
                .with_peer(from)
                .with_remedy("every rank must call it with the same weights_only and the same root"),
        )
    }
}

/// How objects in a form are asked for.
fn form(form: u32) -> &'static str {
    if form == SAVED { "weights_only=True" } else { "weights_only=False" }
}

impl Head {
    fn read(parcel: &[u8]) -> Option<Self> {
        let (form, rest) = parcel.split_first_chunk::<4>()?;
        let (root, rest) = rest.split_first_chunk::<4>()?;
        let root = u32::from_le_bytes(*root);
        Some(Self {
            form: u32::from_le_bytes(*form),
            root: (root != NO_ROOT).then(|| Rank::new(root)),
            objects: number(rest.first_chunk::<LENGTH>()?)?,
        })
    }
}

impl Announced {
    fn read(block: &[u8], from: Rank) -> Result<Self> {
        let read = || {
            let (length, rest) = block.split_first_chunk::<LENGTH>()?;
            let (longest, parcel) = rest.split_first_chunk::<LENGTH>()?;
            Some(Self { length: number(length)?, longest: number(longest)?, head: Head::read(parcel)? })
        };
        let is_possible =
            |one: &Self| PARCEL_HEAD <= one.length && one.length <= one.longest && one.longest <= MOST_BYTES;
        read().filter(is_possible).ok_or_else(|| unreadable(from))
    }

    /// Whether all parcels of its sender are in blocks of `length` bytes as a whole.
    fn is_short(self, length: usize) -> bool {
        self.longest <= length - BLOCK_HEAD
    }
}

impl Received {
    /// Finds the objects of a parcel in these bytes, which has come from the rank `from`.
    fn find(&mut self, group: &ProcessGroup, parcel: Range<usize>, from: Rank) -> Result<()> {
        let found = positions(&self.bytes, parcel).ok_or_else(|| ended(group, unreadable(from)))?;
        self.objects.extend(found);
        Ok(())
    }

    fn list<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        for object in &self.objects {
            let bytes = &self.bytes[object.clone()];
            list.append(PyBytes::new_with(py, bytes.len(), |copy| {
                copy.copy_from_slice(bytes);
                Ok(())
            })?)?;
        }
        Ok(list)
    }
}

/// Where each object of a parcel lies within `bytes`; None if it is no parcel.
fn positions(bytes: &[u8], parcel: Range<usize>) -> Option<Vec<Range<usize>>> {
    let (start, end) = (parcel.start, parcel.end);
    let whole = bytes.get(parcel)?;
    let table = Head::read(whole)?.objects.checked_mul(LENGTH)?;
    let lengths = whole.get(PARCEL_HEAD..)?.get(..table)?;
    let mut next = start + PARCEL_HEAD + table;
    let mut found = Vec::with_capacity(table / LENGTH);
    for length in lengths.as_chunks::<LENGTH>().0 {
        let last = next.checked_add(number(length)?).filter(|last| *last <= end)?;
        found.push(next..last);
        next = last;
    }
    (next == end).then_some(found)
}

fn number(bytes: &[u8; LENGTH]) -> Option<usize> {
    usize::try_from(u64::from_le_bytes(*bytes)).ok()
}

fn all_gathered(group: &ProcessGroup, call: Call, parcel: &[u8]) -> Result<Received> {
    let (blocks, all) = exchanged(group, call, parcel)?;
    let length = block_bytes(group);
    if all.iter().all(|one| one.is_short(length)) {
        return within_blocks(group, blocks, &all);
    }
    let counts: Vec<usize> = all.iter().map(|one| one.length).collect();
    let mut bytes = zeroed(group, sum(&counts))?;
    group.all_gather_v(parcel, &mut bytes, &counts)?;
    in_a_row(group, bytes, &counts)
}

fn gathered(group: &ProcessGroup, call: Call, root: Rank, parcel: &[u8]) -> Result<Received> {
    let (blocks, all) = exchanged(group, call, parcel)?;
    let (length, is_root) = (block_bytes(group), group.rank() == root);
    if all.iter().all(|one| one.is_short(length)) {
        return if is_root { within_blocks(group, blocks, &all) } else { Ok(Received::default()) };
    }
    let counts = all.iter().map(|one| if is_root { one.length } else { 0 }).collect::<Vec<usize>>();
    let mut bytes = zeroed(group, sum(&counts))?;
    group.all_to_all_v(parcel, &only(group, root, parcel.len()), &mut bytes, &counts)?;
    if is_root { in_a_row(group, bytes, &counts) } else { Ok(Received::default()) }
}

fn broadcasted(
    group: &ProcessGroup,
    call: Call,
    root: Rank,
    (objects, expected): (&[PyBackedBytes], usize),
) -> Result<Received> {
    let (length, is_root) = (block_bytes(group), group.rank() == root);
    let parcel = if is_root { call.packed(objects) } else { Vec::new() };
    let mut first = if is_root { block(&parcel, parcel.len(), length) } else { vec![0; length] };
    group.broadcast::<u8>(&mut first, root)?;
    let one = agreed(group, call, root, &first)?;
    if !is_root && one.head.objects != expected {
        let error = Error::mismatch(format!(
            "{}: rank {root} sends {} objects, and rank {} has a list of {expected}",
            call.caller.name(),
            one.head.objects,
            group.rank()
        ));
        return Err(ended(
            group,
            error.with_peer(root).with_remedy("give every rank a list of the same length"),
        ));
    }
    let mut received = Received::default();
    let place = if one.is_short(length) {
        received.bytes = first;
        BLOCK_HEAD..BLOCK_HEAD + one.length
    } else {
        received.bytes = if is_root { parcel } else { zeroed(group, one.length)? };
        group.broadcast::<u8>(&mut received.bytes, root)?;
        0..one.length
    };
    if is_root {
        return Ok(Received::default());
    }
    received.find(group, place, root)?;
    Ok(received)
}

fn scattered(group: &ProcessGroup, call: Call, root: Rank, objects: &[PyBackedBytes]) -> Result<Received> {
    let (length, is_root) = (block_bytes(group), group.rank() == root);
    let (parcels, counts) =
        if is_root { for_each(group, call, objects) } else { (Vec::new(), only(group, root, 0)) };
    let longest = counts.iter().copied().max().unwrap_or_default();
    let mut blocks = Vec::new();
    if is_root {
        let mut rest = parcels.as_slice();
        for count in &counts {
            let (parcel, others) = rest.split_at(*count);
            blocks.extend(block(parcel, longest, length));
            rest = others;
        }
    }
    let mut first = vec![0; length];
    group.scatter::<u8>(&blocks, &mut first, root)?;
    let one = agreed(group, call, root, &first)?;
    let mut received = Received::default();
    if one.is_short(length) {
        received.bytes = first;
        received.find(group, BLOCK_HEAD..BLOCK_HEAD + one.length, root)?;
        return Ok(received);
    }
    received.bytes = zeroed(group, one.length)?;
    group.all_to_all_v(&parcels, &counts, &mut received.bytes, &only(group, root, one.length))?;
    received.find(group, 0..one.length, root)?;
    Ok(received)
}

/// The objects of a parcel that the rank `from` has sent to this one, which waits for some of a form.
fn opened(
    group: &ProcessGroup,
    from: Rank,
    bytes: Vec<u8>,
    (own, expected): (u32, usize),
) -> Result<Received> {
    const NAME: &str = "recv_object_list";
    let head = Head::read(&bytes).ok_or_else(|| ended(group, unreadable(from)))?;
    if head.form == FAILED {
        return Err(without_objects(NAME, from, &bytes));
    }
    if (head.form, head.objects) != (own, expected) {
        let error = Error::mismatch(format!(
            "{NAME}: rank {from} has sent {} objects with {}, and rank {} waits for {expected} with {}",
            head.objects,
            form(head.form),
            group.rank(),
            form(own)
        ));
        let remedy = "call send_object_list and recv_object_list with lists of the same length, and the same weights_only";
        return Err(ended(group, error.with_peer(from).with_remedy(remedy)));
    }
    let mut received = Received { bytes, objects: Vec::new() };
    received.find(group, 0..received.bytes.len(), from)?;
    Ok(received)
}

/// How long blocks are: the same on every rank.
fn block_bytes(group: &ProcessGroup) -> usize {
    (BLOCKS_BYTES / group.world_size().count()).clamp(SHORTEST_BLOCK, LONGEST_BLOCK)
}

/// A block of `length` bytes for a parcel of a rank, the longest parcel of which is so long.
fn block(parcel: &[u8], longest: usize, length: usize) -> Vec<u8> {
    let mut block = Vec::with_capacity(length);
    block.extend_from_slice(&(parcel.len() as u64).to_le_bytes());
    block.extend_from_slice(&(longest as u64).to_le_bytes());
    block.extend_from_slice(&parcel[..parcel.len().min(length - BLOCK_HEAD)]);
    block.resize(length, 0);
    block
}

/// The blocks of all ranks, one after the other, and what they say. An error on every rank if one has no objects, or other arguments.
fn exchanged(group: &ProcessGroup, call: Call, parcel: &[u8]) -> Result<(Vec<u8>, Vec<Announced>)> {
    let (world, length) = (group.world_size(), block_bytes(group));
    let mut blocks = vec![0; length * world.count()];
    group.all_gather::<u8>(&block(parcel, parcel.len(), length), &mut blocks)?;
    let read = |(rank, block): (Rank, &[u8])| Announced::read(block, rank);
    let all: Result<Vec<Announced>> = world.ranks().zip(blocks.chunks_exact(length)).map(read).collect();
    let all = all.map_err(|error| ended(group, error))?;
    let each = || world.ranks().zip(&all);
    // First what all ranks see alike.
    let failure = each()
        .zip(blocks.chunks_exact(length))
        .find_map(|((rank, one), block)| call.failure(rank, *one, block));
    if let Some(failure) = failure {
        return Err(failure);
    }
    let difference = each().find_map(|(rank, one)| call.difference(group.rank(), rank, one.head));
    match difference {
        Some(error) => Err(ended(group, error)),
        None => Ok((blocks, all)),
    }
}

/// What the root's block says. An error if it has no objects, or other arguments.
fn agreed(group: &ProcessGroup, call: Call, root: Rank, block: &[u8]) -> Result<Announced> {
    let one = Announced::read(block, root).map_err(|error| ended(group, error))?;
    if let Some(failure) = call.failure(root, one, block) {
        return Err(failure);
    }
    match call.difference(group.rank(), root, one.head) {
        Some(error) => Err(ended(group, error)),
        None => Ok(one),
    }
}

/// The objects of parcels that are in the blocks of all ranks.
fn within_blocks(group: &ProcessGroup, blocks: Vec<u8>, all: &[Announced]) -> Result<Received> {
    let length = block_bytes(group);
    let mut received = Received { bytes: blocks, objects: Vec::with_capacity(all.len()) };
    for (rank, one) in group.world_size().ranks().zip(all) {
        let start = rank.index() * length + BLOCK_HEAD;
        received.find(group, start..start + one.length, rank)?;
    }
    Ok(received)
}

/// The objects of parcels of all ranks, which have these lengths.
fn in_a_row(group: &ProcessGroup, bytes: Vec<u8>, counts: &[usize]) -> Result<Received> {
    let mut received = Received { bytes, objects: Vec::with_capacity(counts.len()) };
    let mut start = 0;
    for (rank, length) in group.world_size().ranks().zip(counts) {
        received.find(group, start..start + length, rank)?;
        start += length;
    }
    Ok(received)
}

/// The root's parcels for all ranks, one after the other, and how long each is. Without room for all of them there is none for any rank, and each is told
/// why: the ranks go on together.
fn for_each(group: &ProcessGroup, call: Call, objects: &[PyBackedBytes]) -> (Vec<u8>, Vec<usize>) {
    let ranks = group.world_size().count();
    let to_all = |parcel: Vec<u8>| (parcel.repeat(ranks), vec![parcel.len(); ranks]);
    if call.form == FAILED {
        return to_all(call.packed(objects));
    }
    let each = || objects.iter().map(std::slice::from_ref);
    let counts: Vec<usize> = each().map(parcel_bytes).collect();
    match room(sum(&counts)) {
        Ok(room) => {
            (each().fold(room, |parcels, object| written(parcels, call.form, call.root, object)), counts)
        }
        Err(cause) => to_all(refusal(call.root, &cause)),
    }
}

/// How long the parcel of these objects is.
fn parcel_bytes(objects: &[impl AsRef<[u8]>]) -> usize {
    objects
        .iter()
        .fold(PARCEL_HEAD, |sum, object| sum.saturating_add(LENGTH).saturating_add(object.as_ref().len()))
}

/// The objects of this rank as a parcel. If they are too long, or in place of objects there is why there are none, it says that.
fn packed(form: u32, root: Option<Rank>, objects: &[impl AsRef<[u8]>]) -> Vec<u8> {
    if form == FAILED {
        let cause = objects.first().map(|cause| String::from_utf8_lossy(cause.as_ref()).into_owned());
        return refusal(root, &cause.unwrap_or_default());
    }
    match room(parcel_bytes(objects)) {
        Ok(room) => written(room, form, root, objects),
        Err(cause) => refusal(root, &cause),
    }
}

/// In place of a parcel, why there is none. It fits into the shortest block.
fn refusal(root: Option<Rank>, cause: &str) -> Vec<u8> {
    let cause: String = cause.chars().take(CAUSE_CHARACTERS).collect();
    written(Vec::new(), FAILED, root, &[cause])
}

fn written(mut parcel: Vec<u8>, form: u32, root: Option<Rank>, objects: &[impl AsRef<[u8]>]) -> Vec<u8> {
    parcel.extend_from_slice(&form.to_le_bytes());
    parcel.extend_from_slice(&root.map_or(NO_ROOT, Rank::get).to_le_bytes());
    parcel.extend_from_slice(&(objects.len() as u64).to_le_bytes());
    for object in objects {
        parcel.extend_from_slice(&(object.as_ref().len() as u64).to_le_bytes());
    }
    for object in objects {
        parcel.extend_from_slice(object.as_ref());
    }
    parcel
}

/// Room for `length` bytes; or why there is none.
fn room(length: usize) -> std::result::Result<Vec<u8>, String> {
    if length > MOST_BYTES {
        return Err(too_long(length));
    }
    let mut bytes = Vec::new();
    match bytes.try_reserve_exact(length) {
        Ok(()) => Ok(bytes),
        Err(_) => Err(format!("there is no memory for {length} bytes of objects")),
    }
}

fn too_long(length: usize) -> String {
    format!("{length} bytes of objects are more than a call may move, {MOST_BYTES}")
}

/// Memory for what comes. Without it this rank cannot go on, and the others would wait for it.
pub fn zeroed(group: &ProcessGroup, length: usize) -> Result<Vec<u8>> {
    match room(length) {
        Ok(mut bytes) => {
            bytes.resize(length, 0);
            Ok(bytes)
        }
        Err(cause) => {
            Err(ended(group, Error::aborted(cause).with_remedy("send large data as tensors, or in parts")))
        }
    }
}

/// A count for each rank: `length` for one of them.
fn only(group: &ProcessGroup, rank: Rank, length: usize) -> Vec<usize> {
    group.world_size().ranks().map(|other| if other == rank { length } else { 0 }).collect()
}

fn sum(counts: &[usize]) -> usize {
    counts.iter().fold(0, |sum, count| sum.saturating_add(*count))
}

/// The error of a rank that has sent, in place of objects, why there are none.
fn without_objects(name: &str, from: Rank, parcel: &[u8]) -> Error {
    let cause = positions(parcel, 0..parcel.len());
    let cause = cause.and_then(|objects| parcel.get(objects.first()?.clone()));
    let cause = String::from_utf8_lossy(cause.unwrap_or_default());
    Error::invalid_argument(format!("{name}: rank {from} has sent no objects: {cause}")).with_peer(from)
}

fn unreadable(from: Rank) -> Error {
    Error::mismatch(format!("what rank {from} has sent are no objects that this rank can read"))
        .with_peer(from)
        .with_remedy("every rank must have the same version of phalanx_torch")
}

/// The error, with which the group ends on every rank.
fn ended(group: &ProcessGroup, error: Error) -> Error {
    group.abort(error.clone());
    error
}
