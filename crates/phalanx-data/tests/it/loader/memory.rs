//! Memory of batches that is used again, and of orders that are too long for it.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

/// Batches that are given back are used again, and only then; in each a loader finds none of what was in it.
#[test]
fn memory_of_batches_that_are_given_back_is_used_again() {
    for workers in [0, 1, 2] {
        let made = Arc::new(AtomicUsize::new(0));
        let loader = |reuse: bool| {
            let made = made.clone();
            let loader =
                DataLoader::builder((0..120).collect::<InMemory<u32>>()).batch_size(3).num_workers(workers);
            let loader = loader.collate_each(
                move |items| {
                    made.fetch_add(1, Ordering::Relaxed);
                    Vec::with_capacity(items)
                },
                |batch: &mut Vec<u32>, item| {
                    batch.push(item);
                    Ok(())
                },
            );
            if reuse { loader.reuse(Vec::clear).build().unwrap() } else { loader.build().unwrap() }
        };
        let pass = |loader: &DataLoader<InMemory<u32>, Vec<u32>>, give_back: bool| {
            made.store(0, Ordering::Relaxed);
            let (mut batches, mut items) = (loader.iter(), Vec::new());
            while let Some(batch) = batches.next() {
                let batch = batch.unwrap();
                items.extend_from_slice(&batch);
                if give_back {
                    batches.recycle(batch);
                }
            }
            assert_eq!(items, (0..120).collect::<Vec<_>>());
            made.load(Ordering::Relaxed)
        };
        let reused = loader(true);
        // As many as there may be at a time: those ahead, two of each worker, and the loop's. The next pass goes on with them.
        let (first, second) = (pass(&reused, true), pass(&reused, true));
        assert!(first >= 1 && first + second <= 2 * workers + 1, "{first} and {second} of {workers} workers");
        assert_eq!((pass(&loader(false), true), pass(&loader(true), false)), (40, 40));
    }
}

#[test]
fn memory_that_would_not_be_used_again_is_an_error() {
    let builder = || DataLoader::builder((0..4).collect::<InMemory<u8>>());
    let add = |batch: &mut Vec<u8>, item: u8| {
        batch.push(item);
        Ok(())
    };
    let in_vain = [
        builder().reuse(Vec::clear).build(),
        builder().collate(Ok).reuse(Vec::clear).build(),
        builder().reuse(Vec::clear).collate_each(Vec::with_capacity, add).build(),
    ];
    for loader in in_vain {
        let error = loader.expect_err("it would do nothing");
        assert!(error.is_invalid_argument() && error.to_string().contains("collate_each"), "{error}");
    }
    assert!(builder().collate_each(Vec::with_capacity, add).reuse(Vec::clear).build().is_ok());
}

#[test]
fn more_items_than_memory_holds_an_order_of_are_refused_if_they_are_shuffled() {
    struct Endless;
    impl Dataset for Endless {
        type Item = usize;

        fn len(&self) -> usize {
            1 << 45
        }

        fn get(&self, index: usize) -> Result<usize> {
            Ok(index)
        }
    }
    let shuffled = DataLoader::builder(Endless).shuffle(true).build();
    let error = shuffled.expect_err("the pass would abort the process");
    assert!(error.is_invalid_argument() && error.to_string().contains("no memory for an order"), "{error}");
    let ordered = DataLoader::builder(Endless).batch_size(2).build().unwrap();
    assert_eq!(ordered.iter().next().unwrap().unwrap(), [0, 1]);
}
