//! Files of digits that are whole, cut off, joined or damaged.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests")]

use std::fs;
use std::io::Write;
use std::path::Path;

use digits::Digits;
use flate2::Compression;
use flate2::write::GzEncoder;

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn idx(sizes: &[u32], bytes: &[u8]) -> Vec<u8> {
    let mut file = vec![0, 0, 8, sizes.len() as u8];
    file.extend(sizes.iter().flat_map(|size| size.to_be_bytes()));
    file.extend(bytes);
    file
}

const IMAGES: &str = "train-images-idx3-ubyte.gz";
const LABELS: &str = "train-labels-idx1-ubyte.gz";

fn write(folder: &Path) -> (Vec<u8>, Vec<u8>) {
    let (images, labels) = (idx(&[2, 28, 28], &[7; 2 * 28 * 28]), idx(&[2], &[3, 9]));
    fs::write(folder.join(IMAGES), gzip(&images)).unwrap();
    fs::write(folder.join(LABELS), gzip(&labels)).unwrap();
    (images, labels)
}

#[test]
fn files_that_are_cut_joined_or_of_something_else_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (images, labels) = write(folder);
    assert_eq!(Digits::read(folder, "train").unwrap().len(), 2);
    let whole = gzip(&images);
    let other_size = idx(&[2, 14, 56], &[7; 2 * 28 * 28]);
    let cases: [(&str, Vec<u8>, &str); 12] = [
        (IMAGES, vec![], "is damaged, cut off, or no gzip file"),
        (IMAGES, whole[..whole.len() / 2].to_vec(), "is damaged, cut off, or no gzip file"),
        (IMAGES, whole[..whole.len() - 1].to_vec(), "is damaged, cut off, or no gzip file"),
        (IMAGES, images.clone(), "is damaged, cut off, or no gzip file"),
        (IMAGES, [whole.clone(), whole.clone()].concat(), "asks for [2, 28, 28] bytes, and 3152 follow"),
        (IMAGES, gzip(&images[..images.len() - 1]), "asks for [2, 28, 28] bytes, and 1567 follow"),
        (IMAGES, gzip(&idx(&[u32::MAX; 3], &[])), "bytes, more than 1073741824"),
        (
            IMAGES,
            gzip(&idx(&[1 << 21, 28, 28], &[7; 9])),
            "asks for [2097152, 28, 28] bytes, more than 1073741824",
        ),
        (IMAGES, gzip(&other_size), "has images of 14 x 56, not 28 x 28"),
        (LABELS, gzip(&idx(&[1], &[3])), "1 labels: they must be as many"),
        (LABELS, gzip(&idx(&[2], &[3, 10])), "label 1 is 10, and digits are 0 to 9"),
        (LABELS, gzip(&images), "it is not an IDX file of bytes with 1 dimensions"),
    ];
    for (name, content, expected) in cases {
        fs::write(folder.join(name), content).unwrap();
        let error = format!("{:#}", Digits::read(folder, "train").err().unwrap());
        assert!(error.contains(name) && error.contains(expected), "{error}");
        write(folder);
    }
    // In two parts, of which none may be lost.
    let (first, second) = images.split_at(1000);
    fs::write(folder.join(IMAGES), [gzip(first), gzip(second)].concat()).unwrap();
    assert_eq!(Digits::read(folder, "train").unwrap().len(), 2);
    fs::write(folder.join(IMAGES), gzip(&idx(&[0, 28, 28], &[]))).unwrap();
    fs::write(folder.join(LABELS), gzip(&idx(&[0], &labels[..0]))).unwrap();
    let error = format!("{:#}", Digits::read(folder, "train").err().unwrap());
    assert!(error.contains("one at least"), "{error}");
}
