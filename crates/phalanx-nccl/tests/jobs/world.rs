//! Processes that are the ranks of a job.

use phalanx::store::{Store, TcpStore, TcpStoreServer};
use phalanx::{Deadline, ProcessGroup, Result};

use crate::ranks::{LIMIT, Worker, start_each};

/// What leaves NCCL nothing but sockets.
const NCCL_SOCKETS: [&str; 3] = ["NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"];

/// The ranks, until they are waited for, and the store at which they meet.
pub struct World(Vec<Worker>, #[allow(dead_code, reason = "it serves until it is dropped")] TcpStoreServer);

impl World {
    /// Starts `ranks` processes in this role. `variables` are for all, or for one rank.
    pub fn start(role: &str, ranks: u32, variables: &[(&str, &str)], of_rank: &[(u32, &str, &str)]) -> Self {
        let (server, ranks) = start_each(role, ranks, |rank, command| {
            command.env("LOCAL_RANK", rank.to_string()).env("LOCAL_WORLD_SIZE", ranks.to_string());
            if crate::is_real() {
                // Its own threads otherwise have the names of ours that have started them.
                command.env("NCCL_SET_THREAD_NAME", "1");
            }
            if crate::is_shared() {
                // It refuses two ranks of one host on one device, and tells hosts apart by this.
                command.env("NCCL_HOSTID", format!("host-of-rank-{rank}")).env("CUDA_VISIBLE_DEVICES", "0");
                command.env("NCCL_SOCKET_IFNAME", "lo").envs(NCCL_SOCKETS.map(|variable| (variable, "1")));
            }
            command.envs(variables.iter().copied());
            command.envs(of_rank.iter().filter(|(of, ..)| *of == rank).map(|(_, name, value)| (name, value)));
        });
        Self(ranks, server)
    }

    /// The process id of a rank.
    pub fn pid(&self, rank: usize) -> u32 {
        self.0[rank].child.id()
    }

    /// Kills a rank, which may be stopped.
    pub fn kill(&mut self, rank: usize) {
        self.0[rank].child.kill().unwrap();
    }

    /// What rank `rank` prints, when it has ended.
    pub fn output(&mut self, rank: usize) -> String {
        let output = self.0[rank].output();
        eprint!("{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// What all print, when they have ended.
    pub fn outputs(mut self) -> Vec<String> {
        (0..self.0.len()).map(|rank| self.output(rank)).collect()
    }
}

/// Waits until all ranks have come here, in the test's store: no failure of the group ends that, and who fails next ends no call before it.
pub fn meet(group: &ProcessGroup) -> Result<()> {
    let soon = Deadline::after(LIMIT);
    let store = TcpStore::connect(format!("127.0.0.1:{}", std::env::var("MASTER_PORT").unwrap()), soon)?;
    store.set(&format!("test/{}", group.rank()), b"here", soon)?;
    group.world_size().ranks().try_for_each(|rank| store.get(&format!("test/{rank}"), soon).map(drop))
}

/// Starts a world, and checks that every rank prints "done".
pub fn all_done(role: &str, ranks: u32, variables: &[(&str, &str)]) {
    for (rank, output) in World::start(role, ranks, variables, &[]).outputs().into_iter().enumerate() {
        assert_eq!(output.trim(), "done", "rank {rank} of {ranks}");
    }
}

/// How many pieces of memory of the stand-in's devices this process has allocated and not freed.
pub fn blocks() -> i32 {
    // SAFETY: the function takes nothing.
    unsafe {
        function::<unsafe extern "C" fn() -> i32>("PHALANX_CUDA_LIBRARY", "libcuda.so.1", "standin_blocks")()
    }
}

/// How many events of the stand-in's devices this process has made.
pub fn events_made() -> i32 {
    // SAFETY: the function takes nothing.
    unsafe {
        function::<unsafe extern "C" fn() -> i32>("PHALANX_CUDA_LIBRARY", "libcuda.so.1", "standin_events")()
    }
}

/// How often this process has asked the stand-in's driver whether an event is reached.
pub fn queries() -> i32 {
    // SAFETY: the function takes nothing.
    unsafe {
        function::<unsafe extern "C" fn() -> i32>("PHALANX_CUDA_LIBRARY", "libcuda.so.1", "standin_queries")()
    }
}

/// How many threads launches of the stand-in have started in this process.
pub fn launch_threads() -> i32 {
    let (variable, library) = ("PHALANX_NCCL_LIBRARY", "libnccl.so.2");
    // SAFETY: the function takes nothing.
    unsafe { function::<unsafe extern "C" fn() -> i32>(variable, library, "standin_launch_threads")() }
}

/// How many communicators of the stand-in this process has aborted.
pub fn aborts() -> i32 {
    let (variable, library) = ("PHALANX_NCCL_LIBRARY", "libnccl.so.2");
    // SAFETY: the function takes nothing.
    unsafe { function::<unsafe extern "C" fn() -> i32>(variable, library, "standin_aborts")() }
}

/// Makes another pool than the default one the current pool of a device of the stand-in, as if another library had done so.
pub fn use_other_pool(device: i32) {
    let (variable, library) = ("PHALANX_CUDA_LIBRARY", "libcuda.so.1");
    // SAFETY: the function takes a number.
    unsafe { function::<unsafe extern "C" fn(i32)>(variable, library, "standin_use_other_pool")(device) }
}

/// Whether the work of one device of the stand-in reaches the memory of another one, 1, and that of its current pool, 2.
pub fn reaches(device: i32, peer: i32) -> i32 {
    let (variable, library) = ("PHALANX_CUDA_LIBRARY", "libcuda.so.1");
    // SAFETY: the function takes two numbers.
    unsafe {
        function::<unsafe extern "C" fn(i32, i32) -> i32>(variable, library, "standin_reaches")(device, peer)
    }
}

/// How often this process has called `ncclCommInitRankConfig`, `ncclCommShrink` and `ncclCommRevoke` of the stand-in.
pub fn calls_of_nccl() -> [i32; 3] {
    let (variable, library) = ("PHALANX_NCCL_LIBRARY", "libnccl.so.2");
    ["standin_inits", "standin_shrinks", "standin_revokes"].map(|name| {
        // SAFETY: the function takes nothing.
        unsafe { function::<unsafe extern "C" fn() -> i32>(variable, library, name)() }
    })
}

/// A function of the library that `variable` names, else of the system's, which is loaded already.
///
/// # Safety
/// `F` is its type.
pub unsafe fn function<F: Copy>(variable: &str, library: &str, name: &str) -> F {
    let path = std::env::var_os(variable).unwrap_or_else(|| library.into());
    // SAFETY: it is loaded already, and stays. The caller answers for the type.
    unsafe { *libloading::Library::new(path).unwrap().get::<F>(name.as_bytes()).unwrap() }
}
