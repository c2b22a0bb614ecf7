//! Copies from the devices of CubeCL.

use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, BackendTypes, Cube};
use burn::tensor::Bytes;
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::server::CopyDescriptor;
use burn_cubecl::kernel::into_contiguous_aligned;
use burn_cubecl::tensor::CubeTensor;
use burn_fusion::{Fusion, FusionBackend};

use super::{Lost, ReadBack};

impl ReadBack {
    /// Has the device copy the elements of `tensor`, row by row, when it comes to it.
    pub fn of(tensor: FloatTensor<Cube>) -> Self {
        let tensor = into_contiguous_aligned(Cube::computed(tensor));
        let (dtype, shape, strides) =
            (tensor.dtype, tensor.meta.shape().clone(), tensor.meta.strides().clone());
        let copy = CopyDescriptor::new(tensor.handle.clone().binding(), shape, strides, dtype.size());
        let client = tensor.client.clone();
        let mut bytes: Pin<Box<dyn Future<Output = Result<Bytes, Lost>> + Send>> = Box::pin(async move {
            let read = client.read_one_tensor_async(copy);
            begun().await;
            read.await.map_err(Lost::by)
        });
        // To `begun`: the copy is in the queue.
        let _pending = bytes.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        Self { dtype, bytes, source: Some(Box::new(tensor)), noted: None }
    }
}

/// CubeCL's backend, with Burn's fusion around it or without: the program chooses that by a feature of Burn's.
trait Computed: Backend {
    /// The tensor in the device's memory. All work that gives it has been handed to the device.
    fn computed(tensor: FloatTensor<Self>) -> CubeTensor;
}

impl Computed for CubeBackend {
    fn computed(tensor: FloatTensor<Self>) -> CubeTensor {
        tensor
    }
}

impl<B> Computed for Fusion<B>
where
    B: FusionBackend + BackendTypes<FloatTensorPrimitive = CubeTensor>,
{
    fn computed(tensor: FloatTensor<Self>) -> CubeTensor {
        tensor.client.clone().resolve_tensor_float::<B>(tensor)
    }
}

/// Is pending once.
fn begun() -> impl Future<Output = ()> {
    let mut again = false;
    std::future::poll_fn(
        move |_| if std::mem::replace(&mut again, true) { Poll::Ready(()) } else { Poll::Pending },
    )
}
