//! The position of a learning-rate scheduler: named numbers.

use std::collections::BTreeMap;

use burn::lr_scheduler::LrSchedulerRecord;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn_pack::{Reader, Scalar, Writer};
use phalanx::state::{StateReader, StateWriter};
use phalanx::{Error, Result};

type Numbers = BTreeMap<String, Scalar>;

pub(super) fn save(scheduler: &ModuleLrScheduler, writer: &mut impl StateWriter, name: &str) -> Result<()> {
    writer.value(name, &numbers(scheduler)?)
}

/// `scheduler` at the saved position.
pub(super) fn load(
    scheduler: &ModuleLrScheduler,
    reader: &impl StateReader,
    name: &str,
) -> Result<ModuleLrScheduler> {
    let saved: Numbers = reader.value(name)?;
    let here = numbers(scheduler)?;
    if !saved.keys().eq(here.keys()) {
        let only = |these: &Numbers, others: &Numbers| {
            let these: Vec<&str> =
                these.keys().filter(|name| !others.contains_key(*name)).map(String::as_str).collect();
            if these.is_empty() { "nothing".to_owned() } else { these.join(", ") }
        };
        return Err(Error::mismatch(format!(
            "the saved state is that of another kind of learning-rate scheduler: it alone has {}, and this one alone {}",
            only(&saved, &here),
            only(&here, &saved)
        ))
            .with_remedy("build the scheduler as it was built when the state was saved"));
    }
    let writer =
        saved.iter().fold(Writer::new(Vec::new()), |writer, (name, value)| writer.with_scalar(name, *value));
    let record = LrSchedulerRecord::from_bytes(writer.into_bytes().map_err(unreadable)?);
    Ok(scheduler.clone().load_record(record.map_err(unreadable)?))
}

/// Burn gives a record only as bytes.
fn numbers(scheduler: &ModuleLrScheduler) -> Result<Numbers> {
    let bytes = scheduler.to_record().into_bytes().map_err(unreadable)?;
    Ok(Reader::from_bytes(bytes).map_err(unreadable)?.scalars().clone())
}

fn unreadable(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::invalid_argument("the state of the learning-rate scheduler cannot be read").with_source(error)
}
