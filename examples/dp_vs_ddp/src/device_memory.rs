//! The memory that is used on CUDA devices, as their driver counts it.

use anyhow::Result;
use phalanx_nccl::Device;

/// The most that was used on each device when somebody looked, beyond what was used at the beginning. What CubeCL keeps for later counts, too,
/// and what other programs take meanwhile.
#[derive(Default)]
pub struct DeviceMemory(Vec<Used>);

struct Used {
    device: Device,
    before: u64,
    most: u64,
}

impl DeviceMemory {
    /// Begins to count on these devices.
    ///
    /// # Errors
    /// If the driver does not say what is used.
    pub fn begin(devices: Vec<Device>) -> Result<Self> {
        let used = |device: Device| {
            let before = device.memory_info()?.used();
            Ok(Used { device, before, most: before })
        };
        Ok(Self(devices.into_iter().map(used).collect::<Result<_>>()?))
    }

    /// Takes note of what is used now.
    ///
    /// # Errors
    /// If the driver does not say.
    pub fn look(&mut self) -> Result<()> {
        for used in &mut self.0 {
            used.most = used.most.max(used.device.memory_info()?.used());
        }
        Ok(())
    }

    /// Of each device, in MB.
    pub fn mb(&self) -> Vec<f64> {
        self.0.iter().map(|used| used.most.saturating_sub(used.before) as f64 / 1e6).collect()
    }
}
