//! Copies from the devices of CubeCL.

use std::pin::Pin;
use std::task::{Context, Poll, Waker};

#[cfg(feature = "nccl")]
use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
#[cfg(feature = "nccl")]
use burn::backend::tensor::{BoolTensor, IntTensor};
use burn::backend::{Backend, BackendTypes, Cube};
use burn::tensor::Bytes;
#[cfg(feature = "nccl")]
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::server::CopyDescriptor;
use burn_cubecl::kernel::into_contiguous_aligned;
use burn_cubecl::tensor::CubeTensor;
use burn_fusion::{Fusion, FusionBackend};
#[cfg(feature = "nccl")]
use burn_fusion::{NoOp, stream::StreamId};
#[cfg(feature = "nccl")]
use burn_ir::{BackendIr, InitOperationIr, OperationIr, OperationOutput};

use super::{Lost, ReadBack};

#[cfg(feature = "nccl")]
impl ReadBack {
    /// No elements, when the device has done all that CubeCL's current stream has been given so far, and `tensor` with it.
    pub fn fence(tensor: &CubeTensor) -> Self {
        // The fence is in the queue when this returns.
        let done = tensor.client.sync_buffers([&tensor.handle]);
        let bytes =
            Box::pin(async move { done.await.map(|()| Bytes::from_bytes_vec(Vec::new())).map_err(Lost::by) });
        Self { dtype: tensor.dtype, bytes, source: None, noted: None }
    }
}

impl ReadBack {
    /// Has the device copy the elements of `tensor`, row by row, when it comes to it.
    pub fn of(tensor: FloatTensor<Cube>) -> Self {
        Self::of_computed(Cube::computed(tensor))
    }

    /// As [`of`](Self::of), for a tensor whose work has been handed to the device.
    pub fn of_computed(tensor: CubeTensor) -> Self {
        let tensor = into_contiguous_aligned(tensor);
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
pub(crate) trait Computed: Backend {
    /// The tensor in the device's memory. All work that gives it has been handed to the device.
    fn computed(tensor: FloatTensor<Self>) -> CubeTensor;

    /// As [`computed`](Self::computed), for integers.
    #[cfg(feature = "nccl")]
    fn computed_int(tensor: IntTensor<Self>) -> CubeTensor;

    /// As [`computed`](Self::computed), for truth values.
    #[cfg(feature = "nccl")]
    fn computed_bool(tensor: BoolTensor<Self>) -> CubeTensor;

    /// A tensor in the device's memory as one of this backend's.
    #[cfg(feature = "nccl")]
    fn stored(tensor: CubeTensor) -> FloatTensor<Self>;

    /// As [`stored`](Self::stored), for integers.
    #[cfg(feature = "nccl")]
    fn stored_int(tensor: CubeTensor) -> IntTensor<Self>;

    /// As [`stored`](Self::stored), for truth values.
    #[cfg(feature = "nccl")]
    fn stored_bool(tensor: CubeTensor) -> BoolTensor<Self>;
}

impl Computed for CubeBackend {
    fn computed(tensor: FloatTensor<Self>) -> CubeTensor {
        tensor
    }

    #[cfg(feature = "nccl")]
    fn computed_int(tensor: IntTensor<Self>) -> CubeTensor {
        tensor
    }

    #[cfg(feature = "nccl")]
    fn computed_bool(tensor: BoolTensor<Self>) -> CubeTensor {
        tensor
    }

    #[cfg(feature = "nccl")]
    fn stored(tensor: CubeTensor) -> FloatTensor<Self> {
        tensor
    }

    #[cfg(feature = "nccl")]
    fn stored_int(tensor: CubeTensor) -> IntTensor<Self> {
        tensor
    }

    #[cfg(feature = "nccl")]
    fn stored_bool(tensor: CubeTensor) -> BoolTensor<Self> {
        tensor
    }
}

impl<B> Computed for Fusion<B>
where
    B: FusionBackend
        + BackendTypes<
            FloatTensorPrimitive = CubeTensor,
            IntTensorPrimitive = CubeTensor,
            BoolTensorPrimitive = CubeTensor,
        >,
{
    fn computed(tensor: FloatTensor<Self>) -> CubeTensor {
        tensor.client.clone().resolve_tensor_float::<B>(tensor)
    }

    #[cfg(feature = "nccl")]
    fn computed_int(tensor: IntTensor<Self>) -> CubeTensor {
        tensor.client.clone().resolve_tensor_int::<B>(tensor)
    }

    #[cfg(feature = "nccl")]
    fn computed_bool(tensor: BoolTensor<Self>) -> CubeTensor {
        tensor.client.clone().resolve_tensor_bool::<B>(tensor)
    }

    #[cfg(feature = "nccl")]
    fn stored(tensor: CubeTensor) -> FloatTensor<Self> {
        registered::<B>(tensor)
    }

    #[cfg(feature = "nccl")]
    fn stored_int(tensor: CubeTensor) -> IntTensor<Self> {
        registered_int::<B>(tensor)
    }

    #[cfg(feature = "nccl")]
    fn stored_bool(tensor: CubeTensor) -> BoolTensor<Self> {
        registered_bool::<B>(tensor)
    }
}

/// A tensor of the backend that `B`'s operations are fused on, as a fused one.
#[cfg(feature = "nccl")]
fn registered<B: FusionBackend>(tensor: FloatTensor<B>) -> FloatTensor<Fusion<B>> {
    let (device, shape, dtype) = (tensor.device(), tensor.shape(), tensor.dtype());
    handed_over::<B>(&device, (shape, dtype), B::float_tensor_handle(tensor))
}

/// As [`registered`], for integers.
#[cfg(feature = "nccl")]
fn registered_int<B: FusionBackend>(tensor: IntTensor<B>) -> IntTensor<Fusion<B>> {
    let (device, shape, dtype) = (tensor.device(), tensor.shape(), tensor.dtype());
    handed_over::<B>(&device, (shape, dtype), B::int_tensor_handle(tensor))
}

/// As [`registered`], for truth values.
#[cfg(feature = "nccl")]
fn registered_bool<B: FusionBackend>(tensor: BoolTensor<B>) -> BoolTensor<Fusion<B>> {
    let (device, shape, dtype) = (tensor.device(), tensor.shape(), tensor.dtype());
    handed_over::<B>(&device, (shape, dtype), B::bool_tensor_handle(tensor))
}

/// A fused tensor of any kind, which fusion has in one type.
#[cfg(feature = "nccl")]
fn handed_over<B: FusionBackend>(
    device: &<B as BackendTypes>::Device,
    (shape, dtype): (Shape, DType),
    handle: <B as BackendIr>::Handle,
) -> FloatTensor<Fusion<B>> {
    let client = burn_fusion::get_client::<B>(device);
    let init = InitOperationIr::create(shape, dtype, || client.register_tensor_handle(handle));
    client.register(StreamId::current(), OperationIr::Init(init), NoOp::<B>::new()).output()
}

/// Is pending once.
fn begun() -> impl Future<Output = ()> {
    let mut again = false;
    std::future::poll_fn(
        move |_| if std::mem::replace(&mut again, true) { Poll::Ready(()) } else { Poll::Pending },
    )
}
