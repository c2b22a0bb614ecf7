//! Files that other programs have written (`tests/files`, made by make.py): the values that these programs read, or an error that
//! names the file. And the same files cut off, joined, longer and damaged.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use phalanx::{Bool, Result};
use phalanx_data::folder::{
    Array, CsvDataset, CsvOptions, ElementType, ImageFolder, JsonLinesDataset, NpyDataset, SafetensorsDataset,
};
use phalanx_data::lmdb::{LmdbDataset, keys_of, keys_of_database};
use phalanx_data::{Dataset, InMemory};
use serde::Deserialize;
use serde_json::Value;

/// The committed files, or those that `tests/files/check.sh` has made today.
pub fn folder(kind: &str) -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/files");
    std::env::var_os("PHALANX_TEST_FILES").map_or(own, PathBuf::from).join(kind)
}

/// What the programs read in the files of a kind.
pub fn values(kind: &str) -> &'static serde_json::Map<String, Value> {
    static VALUES: OnceLock<Value> = OnceLock::new();
    let all =
        VALUES.get_or_init(|| serde_json::from_slice(&fs::read(folder("values.json")).unwrap()).unwrap());
    all[kind].as_object().unwrap()
}

/// The files of a kind, by name: all that programs have read are there.
fn names(kind: &str) -> BTreeSet<String> {
    let entries = fs::read_dir(folder(kind)).unwrap();
    let found: BTreeSet<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    // Of a database in a file the name follows that of the file.
    let read = values(kind).keys().map(|name| name.split(':').next().unwrap());
    let gone: Vec<&str> = read.filter(|name| !found.contains(*name)).collect();
    assert!(gone.is_empty() && !found.is_empty(), "{kind}: {gone:?}");
    found
}

pub fn hex(text: &Value) -> Vec<u8> {
    let text = text.as_str().unwrap().as_bytes();
    text.chunks(2).map(|two| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap()).collect()
}

/// The error names the file and these words.
fn refused<T>(outcome: Result<T>, words: &[&str]) {
    let text = outcome.err().unwrap_or_else(|| panic!("{words:?} is no error")).to_string();
    assert!(words.iter().all(|word| text.contains(word)), "{words:?}: {text}");
}

// Images

/// A data set of one image.
fn image_at(folder: &Path, name: &str, bytes: &[u8]) -> ImageFolder {
    let class = folder.join("class");
    fs::create_dir_all(&class).unwrap();
    for old in fs::read_dir(&class).unwrap() {
        fs::remove_file(old.unwrap().path()).unwrap();
    }
    fs::write(class.join(name), bytes).unwrap();
    ImageFolder::open(folder).unwrap()
}

/// Height, width and pixels.
fn pixels(images: &ImageFolder) -> Result<(u32, u32, Vec<u8>)> {
    let image = images.get(0)?.image;
    Ok((image.height(), image.width(), image.into_raw()))
}

/// What is an error, and a word of it.
const NO_IMAGES: &[(&str, &str)] = &[
    ("animated.png", "first_frame"),
    ("animated.webp", "first_frame"),
    ("joined.ppm", "first_frame"),
    ("pages.tif", "first_frame"),
    ("gif.png", "Gif"),
    ("float.tif", "floats"),
    ("palette.tif", "write it again as PNG"),
];

/// How far apart colours may be, because decoders round differently.
fn tolerance(name: &str) -> i32 {
    match name {
        // The colour of four pixels, spread over them in another way.
        "420.jpg" | "progressive.jpg" | "restarts.jpg" | "turned.jpg" | "opencv.jpg" | "lossy.webp"
        | "two.jpg" => 6,
        name if name.ends_with(".jpg") => 3,
        "jpeg.tif" => 6,
        _ => 0,
    }
}

#[test]
fn images_have_the_pixels_that_pillow_reads() {
    let scratch = tempfile::tempdir().unwrap();
    for name in names("images") {
        let bytes = fs::read(folder("images").join(&name)).unwrap();
        let images = image_at(scratch.path(), &name, &bytes);
        let Some(expected) = values("images").get(&name) else {
            assert!(NO_IMAGES.iter().any(|(refused, _)| *refused == name), "{name}");
            refused(images.get(0), &[&name]);
            continue;
        };
        let same =
            |found: Result<(u32, u32, Vec<u8>)>, (height, width): (&Value, &Value), expected: &Value| {
                let (found_height, found_width, found) = found.unwrap_or_else(|error| panic!("{error}"));
                assert_eq!((&found_height.into(), &found_width.into()), (height, width), "{name}");
                let differences =
                    found.iter().zip(hex(expected)).map(|(a, b)| (i32::from(*a) - i32::from(b)).abs());
                let most = differences.max().unwrap();
                assert!(most <= tolerance(&name), "{name}: {most}");
            };
        let size = (&expected["height"], &expected["width"]);
        if let Some((_, word)) = NO_IMAGES.iter().find(|(refused, _)| *refused == name) {
            refused(images.get(0), &[&name, word]);
            if *word == "first_frame" {
                same(pixels(&images.first_frame(true)), size, &expected["rgb"]);
            }
            continue;
        }
        same(pixels(&images), size, &expected["rgb"]);
        let images = images.apply_orientation(true);
        match expected.get("upright") {
            Some(upright) => same(pixels(&images), (size.1, size.0), upright),
            None => same(pixels(&images), size, &expected["rgb"]),
        }
    }
}

// Tables

#[derive(Clone, Debug, PartialEq, Deserialize)]
struct Record {
    text: String,
    #[serde(default)]
    value: f64,
    small: f32,
    big: u64,
    label: u32,
}

fn records(name: &str) -> Vec<Record> {
    let float = |bits: &Value| {
        bits.as_str().map_or(0.0, |bits| f64::from_bits(u64::from_str_radix(bits, 16).unwrap()))
    };
    let record = |row: &Value| Record {
        text: row["text"].as_str().unwrap().to_owned(),
        value: float(&row["value"]),
        small: float(&row["small"]) as f32,
        big: row["big"].as_str().unwrap().parse().unwrap(),
        label: row["label"].as_u64().unwrap() as u32,
    };
    values("tables")[name].as_array().unwrap().iter().map(record).collect()
}

fn table(path: &Path) -> Result<Vec<Record>> {
    fn all(dataset: impl Dataset<Item = Record>) -> Result<Vec<Record>> {
        (0..dataset.len()).map(|index| dataset.get(index)).collect()
    }
    let name = path.file_name().unwrap().to_str().unwrap();
    match name {
        name if name.ends_with("jsonl") => all(JsonLinesDataset::open(path)?),
        name if name.ends_with("tsv") => {
            all(CsvDataset::with_options(path, CsvOptions::new().delimiter(b'\t'))?)
        }
        name if name.ends_with("headless.csv") => {
            all(CsvDataset::with_options(path, CsvOptions::new().headers(false))?)
        }
        _ => all(CsvDataset::open(path)?),
    }
}

#[test]
fn tables_have_the_values_that_pandas_and_python_read() {
    for name in names("tables") {
        let path = folder("tables").join(&name);
        match &*name {
            "utf-16.csv" | "utf-16.jsonl" => {
                refused(table(&path), &[&name, "line 1", "the file is UTF-16", "iconv"])
            }
            "latin-1.csv" => refused(table(&path), &[&name, "line 3", "not UTF-8", "iconv"]),
            _ => {
                let (found, expected) =
                    (table(&path).unwrap_or_else(|error| panic!("{error}")), records(&name));
                assert!(found.len() > 3 && found.len() == expected.len(), "{name}");
                for (found, expected) in found.iter().zip(&expected) {
                    assert_eq!(found, expected, "{name}");
                    // Zero has a sign.
                    assert_eq!(found.value.to_bits(), expected.value.to_bits(), "{name}");
                }
            }
        }
    }
}

// Arrays and tensors

/// NumPy's name, or safetensors's, of a type.
fn named(name: &str) -> ElementType {
    match name {
        "f2" | "F16" => ElementType::F16,
        "BF16" => ElementType::BF16,
        "f4" | "F32" => ElementType::F32,
        "f8" | "F64" => ElementType::F64,
        "i1" | "I8" => ElementType::I8,
        "i2" | "I16" => ElementType::I16,
        "i4" | "I32" => ElementType::I32,
        "i8" | "I64" => ElementType::I64,
        "u1" | "U8" => ElementType::U8,
        "u2" | "U16" => ElementType::U16,
        "u4" | "U32" => ElementType::U32,
        "u8" | "U64" => ElementType::U64,
        "b1" | "BOOL" => ElementType::Bool,
        other => panic!("{other}"),
    }
}

/// The rows together are what the program reads.
fn same_rows(name: &str, rows: &[Array], expected: &Value) {
    let shape: Vec<usize> = serde_json::from_value(expected["shape"].clone()).unwrap();
    assert_eq!(rows.len(), shape[0], "{name}");
    for row in rows {
        assert_eq!(
            (row.dtype(), row.shape()),
            (named(expected["type"].as_str().unwrap()), &shape[1..]),
            "{name}"
        );
    }
    let bytes: Vec<u8> = rows.iter().flat_map(|row| row.as_bytes().to_vec()).collect();
    assert_eq!(bytes, hex(&expected["bytes"]), "{name}");
}

fn all<D: Dataset>(dataset: &D) -> Result<Vec<D::Item>> {
    (0..dataset.len()).map(|index| dataset.get(index)).collect()
}

#[test]
fn arrays_have_the_values_that_numpy_reads() {
    for name in names("arrays") {
        let dataset = NpyDataset::open(folder("arrays").join(&name));
        match &*name {
            "no-two.npy" => refused(dataset, &[&name, "bytes follow"]),
            "no-zip.npy" => refused(dataset, &[&name, "zip", "np.save"]),
            no if no.starts_with("no-") => refused(dataset, &[&name, "array"]),
            _ => same_rows(&name, &all(&dataset.unwrap()).unwrap(), &values("arrays")[&name]),
        }
    }
    let words = NpyDataset::open(folder("arrays").join("u2.npy")).unwrap().get(3).unwrap();
    let bytes = hex(&values("arrays")["u2.npy"]["bytes"]);
    let expected: Vec<u16> = bytes[36..].chunks(2).map(|two| u16::from_le_bytes([two[0], two[1]])).collect();
    assert_eq!(words.as_slice::<u16>().unwrap(), expected);
    refused(words.as_slice::<i16>(), &["u16", "i16", "convert"]);
    let flags = NpyDataset::open(folder("arrays").join("b1.npy")).unwrap().get(0).unwrap();
    assert_eq!(flags.as_slice::<Bool>().unwrap().len(), 6);
}

#[test]
fn tensors_have_the_values_that_safetensors_reads() {
    for name in names("tensors") {
        let dataset = SafetensorsDataset::open(folder("tensors").join(&name));
        match &*name {
            "no-tensors.safetensors" => refused(dataset, &[&name, "no tensor"]),
            no if no.starts_with("no-") => refused(dataset, &[&name, "\"x\"", "C64"]),
            _ => {
                let mut rows = BTreeMap::<String, Vec<Array>>::new();
                for row in all(&dataset.unwrap()).unwrap() {
                    row.into_iter().for_each(|(name, array)| rows.entry(name).or_default().push(array));
                }
                let expected = values("tensors")[&name].as_object().unwrap();
                assert_eq!(rows.len(), expected.len());
                rows.iter().for_each(|(tensor, rows)| same_rows(tensor, rows, &expected[tensor]));
            }
        }
    }
}

// LMDB

#[test]
fn databases_have_the_items_that_lmdb_reads() {
    for (name, expected) in values("databases") {
        let (file, database) = name.split_once(':').unwrap();
        let path = folder("databases").join(file);
        let expected: Vec<(Vec<u8>, Vec<u8>)> = expected
            .as_array()
            .unwrap()
            .iter()
            .map(|pair| (pair[0].as_str().unwrap().as_bytes().to_vec(), hex(&pair[1])))
            .collect();
        let keys = if database.is_empty() { keys_of(&path) } else { keys_of_database(&path, database) };
        let keys = keys.unwrap();
        assert!(keys.iter().eq(expected.iter().map(|(key, _)| key)) && keys.len() > 5, "{name}");
        let mut dataset = LmdbDataset::with_keys(&path, keys).unwrap();
        if !database.is_empty() {
            dataset = dataset.database(database).unwrap();
        }
        assert!(all(&dataset).unwrap().iter().eq(expected.iter().map(|(_, value)| value)), "{name}");
    }
}

#[test]
fn a_database_is_no_item_and_what_cannot_be_read_rightly_is_refused() {
    for file in ["named.lmdb", "compact.lmdb"] {
        let path = folder("databases").join(file);
        // The main database of a file has the others' names among its keys.
        let main = LmdbDataset::with_keys(&path, ["about", "train"]).unwrap();
        assert_eq!(main.get(0).unwrap(), [b'x'; 48]);
        refused(main.get(1), &[file, "train", "database"]);
        let of = |name: &str| LmdbDataset::with_keys(&path, ["a"]).unwrap().database(name);
        refused(of("absent"), &[file, "absent"]);
        refused(of("about"), &[file, "about"]);
        refused(of("twice"), &[file, "twice", "several values"]);
        refused(of("numbers"), &[file, "numbers", "integers"]);
        refused(LmdbDataset::open(&path).unwrap().get(0), &[file, "with_keys"]);
    }
}

// The same files, not as they were

/// What a reader gives for a file: items that can be compared, or an error.
type Read = fn(&Path) -> Result<Vec<Vec<u8>>>;

fn read_image(path: &Path) -> Result<Vec<Vec<u8>>> {
    let images = ImageFolder::open(path.parent().unwrap().parent().unwrap())?;
    let (height, width, pixels) = pixels(&images)?;
    Ok(vec![[&height.to_le_bytes()[..], &width.to_le_bytes(), &pixels].concat()])
}

fn read_table(path: &Path) -> Result<Vec<Vec<u8>>> {
    Ok(table(path)?.iter().map(|record| format!("{record:?}").into_bytes()).collect())
}

fn read_array(path: &Path) -> Result<Vec<Vec<u8>>> {
    let rows = all(&NpyDataset::open(path)?)?;
    Ok(rows.iter().map(|row| [format!("{row:?}").as_bytes(), row.as_bytes()].concat()).collect())
}

fn read_tensor(path: &Path) -> Result<Vec<Vec<u8>>> {
    let rows = all(&SafetensorsDataset::open(path)?)?;
    let bytes = |(name, array): (&String, &Array)| [name.as_bytes(), array.as_bytes()].concat();
    Ok(rows.iter().map(|row| row.iter().flat_map(bytes).collect()).collect())
}

fn read_database(path: &Path) -> Result<Vec<Vec<u8>>> {
    all(&LmdbDataset::with_keys(path, keys_of(path)?)?)
}

const KINDS: &[(&str, Read)] =
    &[("images", read_image), ("tables", read_table), ("arrays", read_array), ("tensors", read_tensor)];

/// Calls `check` with each file of the kinds, its content, how it is read, and a place for other content.
fn each_file(kinds: &[(&str, Read)], check: impl Fn(&str, &[u8], Read, &Path)) {
    for (kind, read) in kinds {
        for name in names(kind) {
            let scratch = tempfile::tempdir().unwrap();
            let path = scratch.path().join("class").join(&name);
            fs::create_dir(path.parent().unwrap()).unwrap();
            check(&name, &fs::read(folder(kind).join(&name)).unwrap(), *read, &path);
        }
    }
}

/// Reads `content`; an error names the file.
fn read_as(path: &Path, content: &[u8], read: Read) -> Option<Vec<Vec<u8>>> {
    fs::write(path, content).unwrap();
    match read(path) {
        Ok(items) => Some(items),
        Err(error) => {
            let name = path.file_name().unwrap().to_str().unwrap();
            let text = error.to_string();
            assert!(text.contains(name) && !text.contains("panicked"), "{name}: {text}");
            None
        }
    }
}

/// The items of a file as it is, unless it is one that its reader refuses.
fn items_of(name: &str, whole: &[u8], read: Read, path: &Path) -> Option<Vec<Vec<u8>>> {
    let is_text = name.starts_with("utf-16") || name == "latin-1.csv";
    let is_refused =
        is_text || name.starts_with("no-") || NO_IMAGES.iter().any(|(refused, _)| *refused == name);
    let items = read_as(path, whole, read);
    assert_eq!(items.is_none(), is_refused, "{name}");
    items
}

#[test]
fn a_file_that_was_cut_off_gives_its_items_or_an_error() {
    each_file(KINDS, |name, whole, read, path| {
        // Of a file that is refused, a part may be a whole one.
        let Some(items) = items_of(name, whole, read, path) else { return };
        let step = (whole.len() / 60).max(1);
        for end in (0..whole.len()).step_by(step).chain(whole.len().saturating_sub(40)..whole.len()) {
            let Some(found) = read_as(path, &whole[..end], read) else { continue };
            if name.ends_with("jsonl") {
                // A whole line, or one whose number has an end that is a number too, cannot be told from a whole file.
                let lines =
                    whole[..end].split(|byte| *byte == b'\n').filter(|line| !line.trim_ascii().is_empty());
                assert_eq!(
                    found.len(),
                    lines.count().saturating_sub(usize::from(end <= 3 && found.is_empty())),
                    "{name} up to {end}"
                );
                continue;
            }
            if name.ends_with("sv") {
                // As above: all records in front of the last are right.
                let sure = found.len().saturating_sub(1);
                assert_eq!(found[..sure], items[..sure], "{name} up to {end}");
                let next = items.get(found.len());
                assert!(next.is_none() || end < whole.len() - 1, "{name} up to {end}");
                continue;
            }
            assert!(found == items, "{name} up to {end} of {}", whole.len());
        }
    });
}

#[test]
fn files_that_were_joined_give_all_items_or_an_error() {
    each_file(KINDS, |name, whole, read, path| {
        let Some(items) = items_of(name, whole, read, path) else { return };
        let is_image = folder("images").join(name).exists();
        // These have an end, and more may follow it, as cameras do: Pillow reads the first.
        let has_end = [".jpg", ".png", ".tif"].iter().any(|end| name.ends_with(end));
        if let Some(found) = read_as(path, &[whole, whole].concat(), read) {
            match (is_image, has_end) {
                (true, true) => assert_eq!(found, items, "{name}"),
                (true, false) => panic!("{name} is no error"),
                (false, _) => assert_eq!(found.len(), 2 * items.len(), "{name}"),
            }
        }
        // Cut off, and then another whole one.
        for cut in [whole.len() / 3, whole.len() / 2, whole.len() - 3] {
            // A TIFF says neither its length nor what its pixels are, so that what stands in their place is a picture: the guide says so.
            let Some(found) = read_as(path, &[&whole[..cut], whole].concat(), read) else { continue };
            let is_more = !is_image && found.len() > items.len();
            assert!(found == items || is_more || name.ends_with(".tif"), "{name}, {cut}");
        }
    });
}

#[test]
fn bytes_behind_the_end_are_no_items() {
    each_file(KINDS, |name, whole, read, path| {
        let Some(items) = items_of(name, whole, read, path) else { return };
        for more in [&b"\0"[..], b"\n\n", b"more", &[0xff; 40]] {
            if let Some(found) = read_as(path, &[whole, more].concat(), read) {
                assert!(found == items, "{name} and {more:?}");
            }
        }
    });
}

#[test]
fn damaged_files_give_no_fewer_items_and_no_panic() {
    each_file(KINDS, |name, whole, read, path| {
        let Some(items) = items_of(name, whole, read, path) else { return };
        let step = (whole.len() / 40).max(1);
        for at in (0..whole.len()).step_by(step) {
            for flip in [0x01, 0x80, 0xff] {
                let mut content = whole.to_vec();
                content[at] ^= flip;
                if let Some(found) = read_as(path, &content, read) {
                    // A line break, a quote or a side may be what was damaged: then there are others, or more of them.
                    let is_text = name.ends_with("sv") || name.ends_with("jsonl");
                    let is_head = at < 128;
                    assert!(
                        found.len() >= items.len() || is_text || is_head,
                        "{name}, byte {at}: {}",
                        found.len()
                    );
                }
            }
        }
    });
}

#[test]
fn databases_that_were_cut_off_or_joined_give_their_items_or_an_error() {
    each_file(&[("databases", read_database)], |name, whole, read, path| {
        let items = read_as(path, whole, read);
        for end in (0..whole.len()).step_by(whole.len() / 40) {
            if let Some(found) = read_as(path, &whole[..end], read) {
                assert_eq!(Some(&found), items.as_ref(), "{name} up to {end}");
            }
        }
        assert!(read_as(path, &[whole, whole].concat(), read).is_none(), "{name} twice");
    });
}

#[test]
fn empty_files_are_named() {
    each_file(KINDS, |name, _, read, path| {
        let found = read_as(path, b"", read);
        // No line is no item, as in Python; a table without a line of headers is none.
        let may_be_empty = name.ends_with("jsonl") || name.ends_with("headless.csv");
        assert_eq!(found, may_be_empty.then(Vec::new), "{name}");
    });
    assert!(InMemory::<u8>::new(Vec::new()).is_empty());
}
