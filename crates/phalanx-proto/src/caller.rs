//! The user's calls, of which collectives are parts.

use serde::{Deserialize, Serialize};

macro_rules! callers {
    ($($(#[$doc:meta])* $caller:ident = $code:literal, $name:literal;)*) => {
        /// A call that a user writes and that makes collectives internally, such as `Checkpoints::open`.
        ///
        /// The code between users and groups, an adapter or a function of `phalanx`, sets it with
        /// `ProcessGroup::in_call`. Every rank sends it with its collectives:
        /// the calls are compared, and errors name them.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        #[non_exhaustive]
        #[repr(u8)]
        pub enum Caller {
            $($(#[$doc])* $caller = $code,)*
        }

        impl Caller {
            /// Every call, in the order of this list.
            pub(crate) const ALL: &[Self] = &[$(Self::$caller),*];

            /// The name, as a user writes it.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$caller => $name,)*
                }
            }
        }
    };
}

callers! {
    /// `init`, and `ProcessGroup::join`.
    Init = 1, "init";
    /// `ProcessGroup::new_group`.
    NewGroup = 2, "new_group";
    /// `ProcessGroup::split`.
    Split = 3, "split";
    /// `ProcessGroup::broadcast_object`.
    BroadcastObject = 4, "broadcast_object";
    /// `ProcessGroup::all_gather_object`.
    AllGatherObject = 5, "all_gather_object";
    /// `ProcessGroup::gather_object`.
    GatherObject = 6, "gather_object";
    /// `ProcessGroup::scatter_object`.
    ScatterObject = 7, "scatter_object";
    /// `Checkpoints::open`.
    CheckpointsOpen = 8, "Checkpoints::open";
    /// `Checkpoints::newest`.
    CheckpointsNewest = 9, "Checkpoints::newest";
    /// `elastic::run`, between the calls of its loop.
    ElasticRun = 10, "elastic::run";
    /// `Context::step`.
    ElasticStep = 11, "Context::step";
    /// `Context::commit`.
    ElasticCommit = 12, "Context::commit";
    /// `Context::sync`.
    ElasticSync = 13, "Context::sync";
    /// `JoinGroup::join` and an adapter's form of it: `Ddp::join`.
    Join = 14, "Ddp::join";
    /// An adapter's constructor, which compares and copies the model.
    DdpNew = 15, "Ddp::new";
    /// An adapter's forward pass, which copies buffers.
    DdpForward = 16, "Ddp::forward";
    /// An adapter's backward pass, which averages gradients.
    DdpBackward = 17, "Ddp::backward";
    /// An adapter's norm of sharded gradients.
    DdpClipGradNorm = 18, "Ddp::clip_grad_norm";
    /// An adapter's average of parameters.
    DdpAverageParameters = 19, "Ddp::average_parameters";
    /// An adapter's comparison of replicas.
    DdpReplicasIdentical = 20, "Ddp::replicas_identical";
    /// An adapter's registration of a communication hook.
    DdpRegisterCommHook = 21, "Ddp::register_comm_hook";
    /// The constructor of an optimizer whose state is sharded.
    ZeroNew = 22, "ZeroRedundancyOptimizer::new";
    /// Its step.
    ZeroStep = 23, "ZeroRedundancyOptimizer::step";
    /// Gathering its state.
    ZeroConsolidate = 24, "ZeroRedundancyOptimizer::consolidate";
    /// A batch norm over all ranks, in either direction.
    SyncBatchNorm = 25, "SyncBatchNorm";
    /// A framework's own trainer, on several ranks.
    DdpStrategy = 26, "DdpStrategy";
    /// An adapter's mean of one number of each rank.
    DdpMean = 27, "Ddp::mean";
    /// An adapter's sum of one number of each rank.
    DdpSum = 28, "Ddp::sum";
    /// `Checkpoints::save_sharded`.
    CheckpointsSaveSharded = 29, "Checkpoints::save_sharded";
    /// `ProcessGroup::main_process_first`.
    MainProcessFirst = 30, "main_process_first";
    /// `ProcessGroup::local_main_process_first`.
    LocalMainProcessFirst = 31, "local_main_process_first";
    /// `DeviceMesh::new`.
    DeviceMeshNew = 32, "DeviceMesh::new";
    /// `DeviceMesh::flatten`.
    DeviceMeshFlatten = 33, "DeviceMesh::flatten";
    /// `ProcessGroup::close`.
    Close = 34, "close";
    /// An adapter's backward pass in which ranks count by their numbers of samples.
    DdpBackwardWeighted = 35, "Ddp::backward_weighted";
    /// An adapter's gather of tensors, whose gradients are added up over ranks.
    AllGather = 36, "Collectives::all_gather";
    /// `RpcBuilder::start`, also of a parameter server.
    RpcStart = 38, "RpcBuilder::start";
    /// The start of a run's record.
    RunStart = 40, "Run::start";
    /// Means of what ranks log.
    RunLogMean = 41, "Run::log_means";
    /// What each rank uses of its machine.
    RunLogSystem = 42, "Run::log_system";
    /// The constructor of a communicator for the memory of devices.
    CommunicatorNew = 50, "Communicator::new";
    /// A layer whose weights are divided among ranks, in either direction, and its division.
    TensorParallel = 51, "TensorGroup";
    /// A pipeline on several ranks: its start, and the end of each of its steps.
    PipelineTrain = 52, "Pipeline::train";
    /// A model whose parameters are sharded: its units, their passes in either direction, and what ranks compare.
    Fsdp = 53, "Fsdp";
    /// An adapter's evaluation, before which ranks take over buffers.
    DdpEvaluate = 54, "Ddp::evaluate";
    /// An adapter's comparison of buffers.
    DdpBuffersIdentical = 55, "Ddp::buffers_identical";
    /// A saved state of which each rank has a part.
    TrainStateCheckpoint = 56, "TrainState::checkpoint";
    /// The first step of an adapter's optimizer in a group, in which ranks compare theirs.
    DdpStep = 57, "Ddp::step";
    /// Loading a state of which each rank has a part.
    ShardedStateLoad = 58, "ShardedState::load";
    /// Reading a checkpoint of another job.
    CheckpointsRead = 59, "Checkpoints::read";
    /// PyTorch's average of integers, which its backend makes of a sum.
    IntegerAverage = 60, "ReduceOp.AVG of integers";
    /// A call with tensors of `int16`: a type that collectives see as another one.
    TensorsOfInt16 = 61, "tensors of int16";
    /// A call with tensors of `uint16`: a type that collectives see as another one.
    TensorsOfUint16 = 62, "tensors of uint16";
    /// A call with tensors of `uint32`: a type that collectives see as another one.
    TensorsOfUint32 = 63, "tensors of uint32";
    /// A call with tensors of `uint64`: a type that collectives see as another one.
    TensorsOfUint64 = 64, "tensors of uint64";
    /// A call with tensors of `float8_e4m3fn`: a type that collectives see as another one.
    TensorsOfFloat8E4m3fn = 65, "tensors of float8_e4m3fn";
    /// A call with tensors of `float8_e4m3fnuz`: a type that collectives see as another one.
    TensorsOfFloat8E4m3fnuz = 66, "tensors of float8_e4m3fnuz";
    /// A call with tensors of `float8_e5m2`: a type that collectives see as another one.
    TensorsOfFloat8E5m2 = 67, "tensors of float8_e5m2";
    /// A call with tensors of `float8_e5m2fnuz`: a type that collectives see as another one.
    TensorsOfFloat8E5m2fnuz = 68, "tensors of float8_e5m2fnuz";
    /// A call with tensors of `float8_e8m0fnu`: a type that collectives see as another one.
    TensorsOfFloat8E8m0fnu = 69, "tensors of float8_e8m0fnu";
    /// A call with tensors of `float4_e2m1fn_x2`: a type that collectives see as another one.
    TensorsOfFloat4E2m1fnX2 = 70, "tensors of float4_e2m1fn_x2";
    /// A call with tensors of `complex32`: complex numbers, which are pairs of floats to collectives.
    TensorsOfComplex32 = 71, "tensors of complex32";
    /// A call with tensors of `complex64`: complex numbers, which are pairs of floats to collectives.
    TensorsOfComplex64 = 72, "tensors of complex64";
    /// A call with tensors of `complex128`: complex numbers, which are pairs of floats to collectives.
    TensorsOfComplex128 = 73, "tensors of complex128";
    /// As [`IntegerAverage`](Self::IntegerAverage), in a wider type than `int8`, which the tensors have.
    AverageOfInt8 = 74, "ReduceOp.AVG of int8";
    /// As [`IntegerAverage`](Self::IntegerAverage), in a wider type than `uint8`, which the tensors have.
    AverageOfUint8 = 75, "ReduceOp.AVG of uint8";
    /// As [`IntegerAverage`](Self::IntegerAverage), in a wider type than `int16`, which the tensors have.
    AverageOfInt16 = 76, "ReduceOp.AVG of int16";
    /// As [`IntegerAverage`](Self::IntegerAverage), in a wider type than `uint16`, which the tensors have.
    AverageOfUint16 = 77, "ReduceOp.AVG of uint16";
    /// As [`IntegerAverage`](Self::IntegerAverage), in a wider type than `int32`, which the tensors have.
    AverageOfInt32 = 78, "ReduceOp.AVG of int32";
    /// As [`IntegerAverage`](Self::IntegerAverage), in a wider type than `uint32`, which the tensors have.
    AverageOfUint32 = 79, "ReduceOp.AVG of uint32";
    /// `all_gather_object` of the package for Python, whose objects are pickled.
    PickledAllGatherObject = 80, "phalanx_torch.all_gather_object";
    /// `gather_object` of the package for Python.
    PickledGatherObject = 81, "phalanx_torch.gather_object";
    /// `broadcast_object_list` of the package for Python.
    PickledBroadcastObjectList = 82, "phalanx_torch.broadcast_object_list";
    /// `scatter_object_list` of the package for Python.
    PickledScatterObjectList = 83, "phalanx_torch.scatter_object_list";
    /// A gather of the rows of sparse tensors, of which each rank makes their sum.
    SumOfSparse = 84, "sum of sparse tensors";
    /// A gather of the rows of sparse tensors, of which each rank makes their average.
    AverageOfSparse = 85, "average of sparse tensors";
    /// A reduction of integers that the program multiplies by its factors, before and after it.
    ScaledIntegers = 86, "scaled integers";
    /// A loader's comparison of what ranks load.
    CheckRanks = 87, "check_ranks";
    /// The comparison of samplers before a checkpoint is loaded.
    TrainStateResume = 88, "TrainState::resume";
}

impl Caller {
    /// The call with this number on the wire; None if there is none.
    #[doc(hidden)]
    pub fn from_wire(code: u8) -> Option<Self> {
        Self::ALL.iter().copied().find(|caller| *caller as u8 == code)
    }

    /// Whether it is called once for each batch. A rank with fewer batches ends while the others still call it.
    pub(crate) const fn is_for_each_batch(self) -> bool {
        matches!(
            self,
            Self::DdpForward
                | Self::DdpBackward
                | Self::DdpBackwardWeighted
                | Self::AllGather
                | Self::DdpClipGradNorm
                | Self::DdpStep
                | Self::ZeroStep
                | Self::SyncBatchNorm
                | Self::Join
                | Self::RunLogMean
                | Self::TensorParallel
                | Self::PipelineTrain
                | Self::Fsdp
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_caller_has_a_code_and_a_name_of_its_own() {
        for (index, caller) in Caller::ALL.iter().enumerate() {
            assert_eq!(Caller::from_wire(*caller as u8), Some(*caller));
            assert!(Caller::ALL[..index].iter().all(|other| other.name() != caller.name()), "{caller:?}");
        }
        assert_eq!(Caller::from_wire(0), None, "which stands for none");
    }

    #[test]
    fn the_wire_s_page_has_every_caller() {
        let page = include_str!("../../../docs/wire.md");
        for caller in Caller::ALL {
            assert!(page.contains(&format!(" {} {}", *caller as u8, caller.name())), "{caller:?} is missing");
        }
    }
}
