//! From a group to a communicator.

use std::ffi::c_int;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::ptr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use phalanx::adapter::warn;
use phalanx::{Caller, Deadline, Error, ProcessGroup, Rank, Result, Sequence};

use super::shared::{Handle, Shared};
use super::shrink::{self, Offer};
use super::siblings::{Member, Siblings};
use super::{Communicator, CommunicatorOptions, Owner, watchdog};
use crate::cuda::{Device, DeviceBuffer, Pause, Stream, UUID_BYTES};
use crate::nccl::{Code, Comm, Config, IN_PROGRESS, Nccl, SUCCESS, UNIQUE_ID_BYTES, UniqueId, dotted};

/// What errors call it.
const NAME: &str = "Communicator::new";

/// What a rank brings: the version of its library, its device, on rank 0 the identity, if it has no offer, the communicator that it can shrink, and its
/// place; or why it cannot take part.
type Brought = std::result::Result<(i32, [u8; UUID_BYTES], Vec<u8>, Option<Offer>, Place), String>;

/// The [process](this_process) of a rank, and the number of its device there.
type Place = (u64, u32);

impl Communicator {
    /// A communicator of all ranks of `group`, with `device` for this one. Every rank must call it, in the same order as the
    /// group's collectives.
    ///
    /// libnccl is opened at run time: `PHALANX_NCCL_LIBRARY`, or else `libnccl.so.2` of the system. Rank 0's unique id goes to the others
    /// through the group. The group's time-out limits the wait for them.
    ///
    /// # Errors
    /// On every rank if one has no libnccl, one before 2.27, or another version than rank 0; the group stays usable. If NCCL cannot
    /// connect the ranks, with what NCCL says, for example about two ranks on one device; that ends the group, because NCCL may
    /// have told only some of the ranks. If the group fails.
    #[doc(alias("ncclCommInitRankConfig", "init_process_group"))]
    pub fn new(group: &ProcessGroup, device: &Device) -> Result<Self> {
        Self::with_options(group, device, CommunicatorOptions::default())
    }

    /// As [`new`](Self::new), with `options`, which may differ between ranks.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_options(group: &ProcessGroup, device: &Device, options: CommunicatorOptions) -> Result<Self> {
        Self::made(group, device, options, (None, None))
    }

    /// As [`with_options`](Self::with_options). With `siblings` the other ranks are of this process, and have the same ones.
    pub(crate) fn among(
        group: &ProcessGroup,
        device: &Device,
        options: CommunicatorOptions,
        siblings: Option<Arc<Siblings>>,
    ) -> Result<Self> {
        Self::made(group, device, options, (None, siblings))
    }

    /// As [`among`](Self::among), if possible by shrinking the communicator `last`, which is at its end then.
    pub(super) fn made(
        group: &ProcessGroup,
        device: &Device,
        options: CommunicatorOptions,
        (last, siblings): (Option<&Self>, Option<Arc<Siblings>>),
    ) -> Result<Self> {
        let opened = Nccl::open().and_then(|nccl| Ok((nccl, device.uuid()?)));
        let offer = last.filter(|_| opened.is_ok()).and_then(Self::offer);
        let mut agreed = agree(group, device, opened.clone(), offer)?;
        let left =
            last.and_then(|last| Some((last, shrink::excluded(&agreed.offers, last.world_size().get())?)));
        let shrunk = match left {
            Some((last, excluded)) => shrink_all(group, last, &agreed, excluded, options)?,
            None => None,
        };
        if shrunk.is_none() && agreed.id.is_none() {
            agreed = agree(group, device, opened, None)?;
        }
        let Agreed { nccl, id, sharing, neighbours, .. } = agreed;
        let made = Stream::with_priority(device, true).and_then(|stream| {
            // Between devices of one process NCCL may have a kernel read and write the memory of a call on another device. It opens memory of no pool by
            // itself; at an address of a pool that is not open to its device a kernel fails.
            neighbours.into_iter().try_for_each(|other| device.reach_pool_of(&Device::open(other)?))?;
            let token = DeviceBuffer::zeroed(&stream, 1)?;
            let (raw, identity) = match (shrunk, id) {
                (Some((unused, identity)), _) => (unused.take(), identity),
                (None, Some(id)) => (connect(group, &nccl, device, (id, sharing), options)?, id.0.to_vec()),
                (None, None) => return Err(Error::mismatch("rank 0 has sent no identity")),
            };
            Ok((raw, identity, stream, token))
        });
        let (raw, identity, stream, token) = made.map_err(|error| {
            let failed = group.fail_unless_explained(error.in_operation(NAME, None));
            if failed.operation().is_some() { failed } else { failed.in_operation(NAME, None) }
        })?;
        let shared = Shared::new(group.clone(), nccl, stream, raw);
        let threads = watchdog::start(&shared)
            .map_err(|error| group.fail_unless_explained(Error::other(error).in_operation(NAME, None)))?;
        let member = siblings.map(|siblings| Member::join(siblings, identity.clone()));
        let is_shrinkable = AtomicBool::new(false);
        let owner = Owner { shared, token, options, member, identity, is_shrinkable, threads: Some(threads) };
        Ok(Self { owner: Arc::new(owner), timeout: group.timeout() })
    }
}

/// Two ranks with one device. Whether NCCL connects them, and what it says if it does not, differs between its versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sharing(Rank, Rank);

impl Sharing {
    /// The first two ranks with one device, if there are any.
    fn find(devices: &[[u8; UUID_BYTES]]) -> Option<Self> {
        let rank = |index: usize| Rank::new(index as u32);
        devices.iter().enumerate().find_map(|(index, device)| {
            let first = devices[..index].iter().position(|earlier| earlier == device)?;
            Some(Self(rank(first), rank(index)))
        })
    }

    fn explain(self, error: Error) -> Error {
        let Self(first, second) = self;
        error.with_remedy(format!(
            "ranks {first} and {second} use the same device: give each rank one of its own, by starting as many ranks on a host as it has \
             devices, or by CUDA_VISIBLE_DEVICES"
        ))
    }
}

/// NCCL's communicator of what is left of `last`, and its identity, if every rank has one; else none, on every rank.
fn shrink_all(
    group: &ProcessGroup,
    last: &Communicator,
    agreed: &Agreed,
    excluded: Vec<c_int>,
    options: CommunicatorOptions,
) -> Result<Option<(Unused, Vec<u8>)>> {
    let shrunk = last.shrink(group, excluded, options.blocking);
    let told: std::result::Result<(), String> = shrunk.as_ref().map(|_| ()).map_err(Error::to_string);
    // What was shrunk is ended if this fails.
    let all = group.in_call(Caller::CommunicatorNew).all_gather_object(&told)?;
    let failed = group.world_size().ranks().zip(all).find_map(|(rank, told)| Some((rank, told.err()?)));
    if let Some((rank, cause)) = failed {
        warn(format!("the ranks make a new communicator: rank {rank} could not shrink the old one: {cause}"));
        return Ok(None);
    }
    let first = agreed.offers.first().and_then(Option::as_ref).map_or(0, |(_, rank)| *rank);
    let identity = last.identity_of_shrunk(first);
    Ok(shrunk.ok().map(|unused| (unused, identity)))
}

/// NCCL's communicator that nothing uses yet, or none. It is aborted if nothing takes it.
pub(super) struct Unused {
    nccl: Nccl,
    device: Device,
    handle: Handle,
}

impl Unused {
    pub(super) fn new(nccl: Nccl, device: Device, handle: Handle) -> Self {
        Self { nccl, device, handle }
    }

    pub(super) fn is_none(&self) -> bool {
        self.handle.0.is_null()
    }

    fn take(mut self) -> Comm {
        std::mem::replace(&mut self.handle.0, ptr::null_mut())
    }
}

impl Drop for Unused {
    fn drop(&mut self) {
        if !self.is_none() {
            abandon(self.nccl.clone(), self.device.clone(), self.handle.0);
        }
    }
}

/// What the ranks have agreed upon.
struct Agreed {
    nccl: Nccl,
    /// Rank 0's identity; none if it has an offer.
    id: Option<UniqueId>,
    sharing: Option<Sharing>,
    /// The communicators that the ranks have.
    offers: Vec<Option<Offer>>,
    /// The other ranks' devices of this process, by number.
    neighbours: Vec<u32>,
}

/// What no other process has.
fn this_process() -> u64 {
    static NUMBER: OnceLock<u64> = OnceLock::new();
    *NUMBER.get_or_init(|| RandomState::new().build_hasher().finish())
}

/// The library and rank 0's identity, if every rank has a library of the same version; two ranks with one device; all ranks' offers; and the devices
/// beside `cuda` in this process.
fn agree(
    group: &ProcessGroup,
    cuda: &Device,
    opened: Result<(Nccl, [u8; UUID_BYTES])>,
    offer: Option<Offer>,
) -> Result<Agreed> {
    let is_main = group.rank().is_main();
    let own = opened.and_then(|(nccl, device)| {
        // NCCL serves each identity until all ranks have come.
        let id = if is_main && offer.is_none() { nccl.unique_id()?.0.to_vec() } else { Vec::new() };
        Ok((nccl, device, id))
    });
    let place = (this_process(), cuda.ordinal());
    let brought: Brought = match &own {
        Ok((nccl, device, id)) => Ok((nccl.version(), *device, id.clone(), offer, place)),
        Err(error) => Err(error.to_string()),
    };
    let all: Vec<Brought> = group.in_call(Caller::CommunicatorNew).all_gather_object(&brought)?;
    // Who cannot take part says so in its own words.
    let (nccl, ..) = own?;
    let ranks = group.world_size().ranks();
    let differs = |rank: Rank, version: i32, expected: i32| {
        let (theirs, expected) = (dotted(version), dotted(expected));
        Error::mismatch(format!("rank {rank} has NCCL {theirs}, and rank 0 has {expected}"))
            .with_peer(rank)
            .with_remedy("install the same version on every host")
            .in_operation(NAME, None::<Sequence>)
    };
    // In an elastic job the others go on without a rank that has failed by itself, and so not with this one's version.
    if let Some(Ok((expected, ..))) = all.first().filter(|_| !is_main)
        && *expected != nccl.version()
    {
        return Err(differs(group.rank(), nccl.version(), *expected));
    }
    let (mut first, mut devices, mut offers, mut neighbours) = (None, Vec::new(), Vec::new(), Vec::new());
    for (rank, brought) in ranks.zip(all) {
        let (version, device, id, offer, (process, ordinal)) = brought.map_err(|cause| {
            let error = Error::aborted(format!("rank {rank} cannot take part: {cause}")).with_peer(rank);
            group.note_remote_error(error.in_operation(NAME, None))
        })?;
        devices.push(device);
        offers.push(offer);
        if process == place.0 && ordinal != place.1 {
            neighbours.push(ordinal);
        }
        let (expected, _) = *first.get_or_insert((version, id_of(&id)));
        if version != expected {
            return Err(group.note_remote_error(differs(rank, version, expected)));
        }
    }
    match first {
        Some((_, id)) if id.is_some() || offers.first().is_some_and(Option::is_some) => {
            Ok(Agreed { nccl, id, sharing: Sharing::find(&devices), offers, neighbours })
        }
        _ => Err(Error::mismatch("rank 0 has sent no identity").in_operation(NAME, None)),
    }
}

fn id_of(bytes: &[u8]) -> Option<UniqueId> {
    <[u8; UNIQUE_ID_BYTES]>::try_from(bytes).ok().map(UniqueId)
}

/// Where the thread is that calls `ncclCommInitRankConfig`.
enum Connecting {
    InNccl,
    /// What NCCL has returned.
    Returned(Result<(Handle, Code)>),
    /// That has been taken, or nobody waits for it any more.
    Over,
}

/// NCCL's communicator, when all ranks are connected.
///
/// A communicator that blocks, by its options or by `NCCL_COMM_BLOCKING`, waits for the other ranks inside NCCL, where no deadline reaches
/// it. So a thread of its own makes that call. If NCCL does not return, that thread stays until the process ends.
fn connect(
    group: &ProcessGroup,
    nccl: &Nccl,
    device: &Device,
    (id, sharing): (UniqueId, Option<Sharing>),
    options: CommunicatorOptions,
) -> Result<Comm> {
    let deadline = Deadline::after(group.timeout());
    let late = || {
        Error::timeout("the ranks were not connected by NCCL in time")
            .with_remedy("NCCL_DEBUG=INFO shows how far it is; see NCCL_SOCKET_IFNAME for its interface")
    };
    let interrupted = || group.failure().or_else(|| deadline.has_passed().then(late));
    let connecting = start_connecting(group, nccl, device, id, options.blocking)?;
    let mut pause = Pause::default();
    let (raw, mut state) = loop {
        let mut now = connecting.lock();
        match std::mem::replace(&mut *now, Connecting::Over) {
            Connecting::Returned(returned) => {
                let (Handle(raw), code) = returned?;
                break (raw, code);
            }
            Connecting::InNccl | Connecting::Over => {}
        }
        // It stays over: the thread then ends what it has made.
        interrupted().map_or(Ok(()), Err)?;
        *now = Connecting::InNccl;
        drop(now);
        pause.pause();
    };
    let mut function = "ncclCommInitRankConfig";
    let mut failed = None;
    while state == IN_PROGRESS && failed.is_none() {
        pause.pause();
        // SAFETY: in progress, NCCL has written a handle, which no other thread has.
        let code = unsafe { (nccl.ncclCommGetAsyncError)(raw, &mut state) };
        if code != SUCCESS {
            (function, state) = ("ncclCommGetAsyncError", code);
        }
        failed = interrupted();
    }
    if state == SUCCESS && failed.is_none() {
        return Ok(raw);
    }
    let error = failed.unwrap_or_else(|| {
        let error = nccl.error(function, state);
        sharing.map_or(error.clone(), |sharing| sharing.explain(error))
    });
    if !raw.is_null() {
        abandon(nccl.clone(), device.clone(), raw);
    }
    Err(error)
}

fn start_connecting(
    group: &ProcessGroup,
    nccl: &Nccl,
    device: &Device,
    id: UniqueId,
    blocking: bool,
) -> Result<Arc<Mutex<Connecting>>> {
    let (world, rank) = (group.world_size().get() as i32, group.rank().get() as i32);
    let connecting = Arc::new(Mutex::new(Connecting::InNccl));
    let (nccl, device, told) = (nccl.clone(), device.clone(), connecting.clone());
    let call = move || {
        let (mut config, mut raw): (_, Comm) = (Config::new(blocking), ptr::null_mut());
        let returned = device.bind().map(|_bound| {
            // SAFETY: it reads the configuration, whose size is in it, and writes one pointer.
            let code = unsafe { (nccl.ncclCommInitRankConfig)(&mut raw, world, id, rank, &mut config) };
            (Handle(raw), code)
        });
        let mut now = told.lock();
        match *now {
            Connecting::Over if !raw.is_null() => abandon(nccl, device, raw),
            Connecting::Over => {}
            Connecting::InNccl | Connecting::Returned(_) => *now = Connecting::Returned(returned),
        }
    };
    let builder = std::thread::Builder::new().name(format!("phalanx-nccl-init-{rank}"));
    builder.spawn(call).map_err(Error::other)?;
    Ok(connecting)
}

/// Aborts a communicator that was never ready, beside this thread: nothing waits for it.
fn abandon(nccl: Nccl, device: Device, raw: Comm) {
    let handle = Handle(raw);
    device.unsettled();
    // If the thread cannot be started, what NCCL has stays until the process ends.
    let _ = std::thread::Builder::new().name("phalanx-nccl-abort".into()).spawn(move || {
        let Handle(raw) = { handle };
        if watchdog::stop_raw(&nccl, &device, raw) {
            device.settled();
            device.free_dropped();
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_two_ranks_with_one_device_are_found() {
        let device = |number: u8| [number; UUID_BYTES];
        assert_eq!(Sharing::find(&[0, 1, 2].map(device)), None);
        let sharing = Sharing::find(&[0, 1, 2, 1, 0].map(device)).unwrap();
        assert_eq!(sharing, Sharing(Rank::new(1), Rank::new(3)));
        // Whatever NCCL's words are.
        let error = sharing.explain(Error::other("invalid usage")).to_string();
        assert!(
            error.contains("invalid usage") && error.contains("ranks 1 and 3 use the same device"),
            "{error}"
        );
    }
}
