//! The program's own random numbers, where passes are seeded.

use burn::tensor::{DType, Device, Distribution, Int, Tensor};

/// Lets a device be seeded for a pass. When this is dropped, the device goes on with the program's own random numbers: as if one number had
/// been drawn, whatever the pass has drawn.
///
/// A device's random numbers belong to the process: what another thread draws meanwhile comes from the pass's, and changes those.
pub(super) struct OwnNumbers {
    device: Device,
    next: Option<u64>,
}

impl OwnNumbers {
    /// Keeps the program's random numbers of `device`.
    pub fn of(device: &Device) -> Self {
        let drawn = Tensor::<1, Int>::random([1], Distribution::Default, (device, DType::I64)).into_data();
        Self { device: device.clone(), next: drawn.iter::<i64>().next().map(|number| number as u64) }
    }
}

impl Drop for OwnNumbers {
    fn drop(&mut self) {
        if let Some(next) = self.next {
            self.device.seed(next);
        }
    }
}
