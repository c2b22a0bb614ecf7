//! The reducer over real groups.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use phalanx::reducer::{ParameterSpec, Reducer, ReducerOptions, StateTensor, broadcast_state};
use phalanx::testing::{Fabric, run};
use phalanx::{DType, ProcessGroup, Rank, Result};

/// Half a dozen parameters, one of them empty and one larger than a bucket.
const SIZES: [usize; 6] = [1000, 0, 1, 70_000, 513, 3];

fn parameters() -> Vec<ParameterSpec> {
    (0..)
        .zip(SIZES)
        .map(|(index, size)| ParameterSpec::new(format!("p{index}"), [size], DType::F32))
        .collect()
}

fn reducer(group: ProcessGroup) -> Result<Reducer> {
    let options = ReducerOptions::default().bucket_cap_mb(0.01);
    Reducer::new(Arc::new(group), parameters(), options)
}

#[test]
fn gradients_are_averaged_over_every_fabric() {
    for (fabric, world) in Fabric::ALL.into_iter().flat_map(|fabric| [(fabric, 1), (fabric, 2), (fabric, 3)])
    {
        run(world, fabric, |group| {
            let rank = group.rank().index();
            let mut reducer = reducer(group).unwrap();
            for step in 0..4 {
                reducer.start().unwrap();
                for place in 0..SIZES.len() {
                    // Another order on every rank.
                    let index = (place + rank) % SIZES.len();
                    let gradient = vec![(rank * (step + 1) + index) as f32; SIZES[index]];
                    reducer.ready(index, bytemuck::cast_slice(&gradient)).unwrap();
                }
                reducer.finish().unwrap();
                for (index, size) in SIZES.into_iter().enumerate() {
                    let mean = (world - 1) as f32 / 2.0 * (step + 1) as f32 + index as f32;
                    let average = reducer.gradient(index).unwrap().unwrap();
                    assert_eq!(
                        average,
                        bytemuck::cast_slice::<f32, u8>(&vec![mean; size]),
                        "{fabric:?} {world}"
                    );
                }
            }
        });
    }
}

#[test]
fn a_parameter_without_gradient_ends_every_rank_at_once() {
    for fabric in Fabric::ALL {
        let begin = Instant::now();
        // The lazy rank may be done before the others have even left the constructor.
        let errors = run(3, fabric, |group| {
            let is_lazy = group.rank().get() == 2;
            let step = || {
                let mut reducer = reducer(group)?;
                reducer.start()?;
                for index in (0..SIZES.len()).filter(|&index| !(is_lazy && index == 4)) {
                    reducer.ready(index, &vec![0; SIZES[index] * 4])?;
                }
                reducer.finish()
            };
            step().unwrap_err()
        });
        for error in errors {
            let message = error.to_string();
            assert!(
                message.contains("rank 2") && message.contains("`p4` (f32 [513])"),
                "{fabric:?}: {message}"
            );
        }
        // Far from the group's time-out.
        assert!(begin.elapsed() < Duration::from_secs(60), "{fabric:?}: {:?}", begin.elapsed());
    }
}

#[test]
fn different_models_are_told_apart_and_state_is_copied() {
    for fabric in Fabric::ALL {
        run(3, fabric, |group| {
            let mut weights = vec![group.rank().get() as u8; 4096];
            let mut steps = vec![group.rank().get() as u8 + 7; 8];
            let mut state = [
                StateTensor { dtype: DType::F32, bytes: &mut weights },
                StateTensor { dtype: DType::I64, bytes: &mut steps },
            ];
            broadcast_state(&group, Rank::MAIN, &mut state).unwrap();
            assert_eq!((weights, steps), (vec![0; 4096], vec![7; 8]));

            let wide = if group.rank().get() == 2 { 5 } else { 4 };
            let model = vec![ParameterSpec::new("head", [2, wide], DType::F32)];
            let error = Reducer::new(Arc::new(group), model, ReducerOptions::default()).err().unwrap();
            let message = error.to_string();
            assert!(error.is_mismatch() && message.contains("(f32 [2, 4]) on rank 0"), "{message}");
            assert!(message.contains("`head` (f32 [2, 5]) on rank 2"), "{message}");
        });
    }
}

#[test]
fn a_slow_rank_is_found_and_the_others_waits_are_its_fault() {
    const SLOW_RANK_DELAY: Duration = Duration::from_millis(50);
    for fabric in [Fabric::Tcp, Fabric::SharedMemory] {
        let warnings = run(3, fabric, |group| {
            let rank = group.rank().index();
            let log = Warnings::default();
            tracing::subscriber::with_default(log.clone(), || {
                let mut reducer = reducer(group).unwrap();
                for step in 0..67 {
                    assert_eq!(reducer.step_times().is_empty(), step <= 32, "step {step}");
                    if rank == 1 {
                        std::thread::sleep(SLOW_RANK_DELAY);
                    }
                    reducer.start().unwrap();
                    for (index, size) in SIZES.into_iter().enumerate() {
                        reducer.ready(index, &vec![0; size * 4]).unwrap();
                    }
                    reducer.finish().unwrap();
                }
                let times = reducer.step_times();
                assert!(times[1].own >= SLOW_RANK_DELAY && times[0].own < times[1].own, "{times:?}");
                assert!(times[0].wait > times[1].wait && times[2].wait > times[1].wait, "{times:?}");
            });
            let mut warnings = log.0.lock().clone();
            warnings.retain(|warning| warning.contains("holds up"));
            warnings
        });
        // Once, although two windows have shown it, and on rank 0 alone.
        assert_eq!(warnings.iter().map(Vec::len).collect::<Vec<_>>(), [1, 0, 0], "{warnings:?}");
        assert!(warnings[0][0].contains("rank 1 holds up the others"), "{warnings:?}");
    }
}

/// Keeps the warnings of one thread.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }

    fn event(&self, event: &tracing::Event<'_>) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, _: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0.push_str(&format!("{value:?}"));
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().push(text.0);
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::Id {
        tracing::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::Id, _: &tracing::Id) {}
    fn enter(&self, _: &tracing::Id) {}
    fn exit(&self, _: &tracing::Id) {}
}
