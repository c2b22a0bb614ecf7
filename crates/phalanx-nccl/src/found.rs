//! What of CUDA and NCCL this machine has, for `phalanx doctor`.

use phalanx::Result;

use crate::cuda::{Cuda, describe};
use crate::nccl::{Nccl, dotted};

/// libcuda, as it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundCuda {
    /// What it was opened as.
    pub library: String,
    /// The version of CUDA up to which the driver goes.
    pub version: String,
    /// The devices that this process sees, by number: names and bytes of memory.
    pub devices: Vec<(String, u64)>,
}

/// libnccl, as it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundNccl {
    /// What it was opened as.
    pub library: String,
    /// Its version.
    pub version: String,
}

/// Opens libcuda, and looks for devices.
///
/// # Errors
/// If it cannot be opened or finds no device.
pub fn find_cuda() -> Result<FoundCuda> {
    let cuda = Cuda::open()?;
    let version = cuda.version()?;
    let devices = (0..cuda.device_count()?).map(|ordinal| describe(&cuda, ordinal)).collect::<Result<_>>()?;
    let version = format!("{}.{}", version / 1000, version / 10 % 100);
    Ok(FoundCuda { library: cuda.name.display().to_string(), version, devices })
}

/// Opens libnccl.
///
/// # Errors
/// If it cannot be opened, or is too old.
pub fn find_nccl() -> Result<FoundNccl> {
    let nccl = Nccl::open()?;
    Ok(FoundNccl { library: nccl.name.display().to_string(), version: dotted(nccl.version()) })
}
