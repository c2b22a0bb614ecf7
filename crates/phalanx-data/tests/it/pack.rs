//! The example that packs a folder.

use std::fs;

use phalanx_data::Dataset;
use phalanx_data::lmdb::LmdbDataset;

#[path = "../../examples/pack.rs"]
#[allow(dead_code, reason = "it has a main of its own")]
mod example;

#[test]
fn a_folder_is_packed_with_the_class_of_each_file() {
    let folder = tempfile::tempdir().unwrap();
    let (photos, packed) = (folder.path().join("photos"), folder.path().join("photos.lmdb"));
    // As an ImageFolder: folders of a class belong to it, and hidden names are no class and no item.
    let files = [("dogs", "b", "rex"), ("cats", "z", "tom"), ("dogs", "a", ""), ("cats/old", "y", "kit")];
    for (class, file, bytes) in files.into_iter().chain([(".cache", "a", "none"), ("dogs", ".b", "none")]) {
        fs::create_dir_all(photos.join(class)).unwrap();
        fs::write(photos.join(class).join(file), bytes).unwrap();
    }
    fs::write(photos.join("readme"), "no class").unwrap();
    example::pack(&photos, &packed).unwrap();
    let dataset = LmdbDataset::open(&packed).unwrap();
    let items: Vec<Vec<u8>> = (0..dataset.len()).map(|index| dataset.get(index).unwrap()).collect();
    assert_eq!(items, [&b"\0\0\0\0kit"[..], b"\0\0\0\0tom", b"\x01\0\0\0", b"\x01\0\0\0rex"]);
    assert_eq!(fs::read_to_string(packed.join("classes.txt")).unwrap(), "cats\ndogs");
}

#[test]
fn a_class_that_is_a_link_to_nowhere_is_not_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let (photos, packed) = (folder.path().join("photos"), folder.path().join("photos.lmdb"));
    fs::create_dir_all(photos.join("dogs")).unwrap();
    fs::write(photos.join("dogs/a"), "rex").unwrap();
    std::os::unix::fs::symlink("nowhere", photos.join("cats")).unwrap();
    let error = example::pack(&photos, &packed).unwrap_err().to_string();
    assert!(error.contains("photos/cats"), "{error}");
    assert!(!packed.exists());
}
