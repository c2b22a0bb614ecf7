//! Variables by name, and their elements as bytes.

use std::collections::HashSet;

use candle_core::{DType as CandleType, Tensor, Var};
use candle_nn::VarMap;
use phalanx::reducer::{ParameterSpec, StateTensor, broadcast_state};
use phalanx::{Communicator, DType, Error, Rank, Result};

#[derive(Clone, Debug)]
pub(crate) struct Named {
    pub spec: ParameterSpec,
    pub var: Var,
}

impl Named {
    pub fn new(name: String, var: Var) -> Result<Self> {
        let dtype = match var.dtype() {
            CandleType::I64 => DType::I64,
            CandleType::BF16 => DType::BF16,
            CandleType::F16 => DType::F16,
            CandleType::F32 => DType::F32,
            CandleType::F64 => DType::F64,
            other => {
                let cause =
                    format!("variable `{name}` has elements of {other:?}, which this adapter does not know");
                return Err(Error::invalid_argument(cause));
            }
        };
        Ok(Self { spec: ParameterSpec::new(name, var.dims(), dtype), var })
    }

    /// A tensor of these elements, of the variable's shape and on its device.
    pub fn tensor(&self, bytes: &[u8]) -> Result<Tensor> {
        let (dtype, device) = (self.var.dtype(), self.var.device());
        Tensor::from_raw_buffer(bytes, dtype, self.var.dims(), device).map_err(Error::other)
    }

    /// The variable's elements.
    pub fn bytes(&self) -> Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity(self.var.elem_count() * self.spec.dtype.size());
        self.var.write_bytes(&mut bytes).map_err(Error::other).map(|()| bytes)
    }

    pub fn write(&self, bytes: &[u8]) -> Result<()> {
        self.var.set(&self.tensor(bytes)?).map_err(Error::other)
    }
}

/// All variables, sorted by name: a `VarMap` has another order in each process.
pub(crate) fn all(map: &VarMap) -> Result<Vec<Named>> {
    let data = map.data().lock().map_err(|_| Error::aborted("a thread panicked while it had the VarMap"))?;
    let found = data.iter().map(|(name, var)| Named::new(name.clone(), var.clone()));
    let mut found = found.collect::<Result<Vec<_>>>()?;
    found.sort_by(|one, other| one.spec.name.cmp(&other.spec.name));
    let mut seen = HashSet::new();
    match found.iter().find(|one| !seen.insert(one.var.id())) {
        Some(twin) => Err(Error::invalid_argument(format!("variable {} has another name, too", twin.spec))
            .with_remedy("keep a tied weight under one name")),
        None => Ok(found),
    }
}

pub(crate) fn specs(variables: &[Named]) -> Vec<ParameterSpec> {
    variables.iter().map(|one| one.spec.clone()).collect()
}

/// Takes over the values that rank `root` has.
pub(crate) fn take_over(group: &dyn Communicator, root: Rank, variables: &[Named]) -> Result<()> {
    let mut values = variables.iter().map(Named::bytes).collect::<Result<Vec<_>>>()?;
    let tensors = variables.iter().zip(&mut values);
    let tensors = tensors.map(|(one, bytes)| StateTensor { dtype: one.spec.dtype, bytes });
    broadcast_state(group, root, &mut tensors.collect::<Vec<_>>())?;
    variables.iter().zip(&values).try_for_each(|(one, bytes)| one.write(bytes))
}
