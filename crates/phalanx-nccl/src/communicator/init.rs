//! From a group to a communicator.

use std::ptr;

use phalanx::{Caller, Deadline, Error, ProcessGroup, Result, Sequence};

use super::shared::{Handle, Shared};
use super::{Communicator, Owner, watchdog};
use crate::cuda::{Device, DeviceBuffer, Pause, Stream};
use crate::nccl::{Comm, Config, IN_PROGRESS, Nccl, SUCCESS, UNIQUE_ID_BYTES, UniqueId, dotted};

/// What errors call it.
const NAME: &str = "Communicator::new";

/// What a rank brings: the version of its library and, on rank 0, the identity; or why it cannot take part.
type Brought = std::result::Result<(i32, Vec<u8>), String>;

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
        let opened = Nccl::open();
        let (nccl, id) = agree(group, opened)?;
        let made = Stream::with_priority(device, true).and_then(|stream| {
            let token = DeviceBuffer::zeroed(&stream, 1)?;
            Ok((connect(group, &nccl, device, id)?, stream, token))
        });
        let (raw, stream, token) = made.map_err(|error| {
            let failed = group.fail_unless_explained(error.in_operation(NAME, None));
            if failed.operation().is_some() { failed } else { failed.in_operation(NAME, None) }
        })?;
        let shared = Shared::new(group.clone(), nccl, stream, raw);
        let threads = watchdog::start(&shared)
            .map_err(|error| group.fail_unless_explained(Error::other(error).in_operation(NAME, None)))?;
        let owner = Owner { shared, token, threads: Some(threads) };
        Ok(Self { owner: std::sync::Arc::new(owner), timeout: group.timeout() })
    }
}

/// The library and rank 0's identity, if every rank has a library of the same version.
fn agree(group: &ProcessGroup, opened: Result<Nccl>) -> Result<(Nccl, UniqueId)> {
    let is_main = group.rank().is_main();
    let own = opened.and_then(|nccl| {
        let id = if is_main { nccl.unique_id()?.0.to_vec() } else { Vec::new() };
        Ok((nccl, id))
    });
    let brought: Brought = match &own {
        Ok((nccl, id)) => Ok((nccl.version(), id.clone())),
        Err(error) => Err(error.to_string()),
    };
    let all: Vec<Brought> = group.in_call(Caller::CommunicatorNew).all_gather_object(&brought)?;
    // Who cannot take part says so in its own words.
    let (nccl, _) = own?;
    let ranks = group.world_size().ranks();
    let mut first = None;
    for (rank, brought) in ranks.zip(all) {
        let (version, id) = brought.map_err(|cause| {
            Error::aborted(format!("rank {rank} cannot take part: {cause}"))
                .with_peer(rank)
                .in_operation(NAME, None)
        })?;
        let (expected, _) = *first.get_or_insert((version, id_of(&id)));
        if version != expected {
            let (theirs, expected) = (dotted(version), dotted(expected));
            return Err(Error::mismatch(format!("rank {rank} has NCCL {theirs}, and rank 0 has {expected}"))
                .with_peer(rank)
                .with_remedy("install the same version on every host")
                .in_operation(NAME, None::<Sequence>));
        }
    }
    match first {
        Some((_, Some(id))) => Ok((nccl, id)),
        _ => Err(Error::mismatch("rank 0 has sent no identity").in_operation(NAME, None)),
    }
}

fn id_of(bytes: &[u8]) -> Option<UniqueId> {
    <[u8; UNIQUE_ID_BYTES]>::try_from(bytes).ok().map(UniqueId)
}

/// NCCL's communicator, when all ranks are connected.
fn connect(group: &ProcessGroup, nccl: &Nccl, device: &Device, id: UniqueId) -> Result<Comm> {
    let deadline = Deadline::after(group.timeout());
    let (world, rank) = (group.world_size().get() as i32, group.rank().get() as i32);
    let (mut config, mut raw): (_, Comm) = (Config::non_blocking(), ptr::null_mut());
    let bound = device.bind()?;
    // SAFETY: it reads the configuration, whose size is in it, and writes one pointer.
    let mut state = unsafe { (nccl.ncclCommInitRankConfig)(&mut raw, world, id, rank, &mut config) };
    let mut function = "ncclCommInitRankConfig";
    let mut pause = Pause::default();
    let mut interrupted = None;
    while state == IN_PROGRESS && interrupted.is_none() {
        pause.pause();
        // SAFETY: in progress, it has written a handle, which no other thread has.
        let code = unsafe { (nccl.ncclCommGetAsyncError)(raw, &mut state) };
        if code != SUCCESS {
            (function, state) = ("ncclCommGetAsyncError", code);
        }
        let late = || {
            let cause = "the ranks were not connected by NCCL in time";
            Error::timeout(cause)
                .with_remedy("NCCL_DEBUG=INFO shows how far it is; see NCCL_SOCKET_IFNAME for its interface")
        };
        interrupted = group.failure().or_else(|| deadline.has_passed().then(late));
    }
    drop(bound);
    if state == SUCCESS && interrupted.is_none() {
        return Ok(raw);
    }
    let error = interrupted.unwrap_or_else(|| nccl.error(function, state));
    if !raw.is_null() {
        abandon(nccl.clone(), device.clone(), raw);
    }
    Err(error)
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
            device.free_deferred();
        }
    });
}
