//! NVIDIA's libraries and devices, as `phalanx-nccl` would find them. Without `--device cuda` and that crate Phalanx does not need them.

use phalanx::Error;
use phalanx_nccl::{FoundCuda, FoundNccl, find_cuda, find_nccl};

use super::finding::Report;

pub(super) fn look(report: &mut Report) {
    cuda(report, find_cuda());
    nccl(report, find_nccl());
}

fn cuda(report: &mut Report, found: Result<FoundCuda, Error>) {
    let FoundCuda { library, version, devices } = match found {
        Ok(found) => found,
        Err(error) => return report.note("cuda", error.to_string()),
    };
    let names: Vec<String> = devices
        .iter()
        .map(|(name, bytes)| format!("{name} with {:.1} GiB", *bytes as f64 / f64::from(1 << 30)))
        .collect();
    let what = format!("{library}, a driver for CUDA {version}");
    match names.is_empty() {
        true => report.note("cuda", format!("{what}, without a device")),
        false => report.good("cuda", format!("{what}; {} devices: {}", names.len(), names.join(", "))),
    }
}

fn nccl(report: &mut Report, found: Result<FoundNccl, Error>) {
    match found {
        Ok(FoundNccl { library, version }) => report.good("nccl", format!("{library}, NCCL {version}")),
        Err(error) => report.note("nccl", error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_versions_and_devices_are_told() {
        let mut report = Report::new("here".to_owned());
        let devices = vec![("NVIDIA H100".to_owned(), 80 << 30); 2];
        cuda(&mut report, Ok(FoundCuda { library: "libcuda.so.1".into(), version: "12.4".into(), devices }));
        nccl(&mut report, Ok(FoundNccl { library: "libnccl.so.2".into(), version: "2.23.4".into() }));
        cuda(&mut report, Err(Error::environment("libcuda.so.1 cannot be opened")));
        let text = report.text(false);
        assert!(
            text.contains(
                "good  cuda  libcuda.so.1, a driver for CUDA 12.4; 2 devices: NVIDIA H100 with 80.0 GiB"
            ),
            "{text}"
        );
        assert!(text.contains("good  nccl  libnccl.so.2, NCCL 2.23.4"), "{text}");
        assert!(text.contains("note  cuda  libcuda.so.1 cannot be opened") && report.is_good(), "{text}");
    }
}
