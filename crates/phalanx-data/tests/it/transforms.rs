//! Transforms of images: Pillow's pixels (`tests/files`, made by make.py), PyTorch's bits, and what is drawn by chance.

use std::collections::BTreeSet;

use image::{Rgb, RgbImage};
use phalanx_data::folder::ImageFolder;
use phalanx_data::transforms::{CenterCrop, Normalize, RandomHorizontalFlip, RandomResizedCrop, Resize};
use phalanx_data::{DataLoader, Dataset, worker_info};

use crate::files::{folder, hex, values};

/// An image whose pixels say where they are.
fn places(width: u32, height: u32) -> RgbImage {
    RgbImage::from_fn(width, height, |x, y| Rgb([x as u8, y as u8, 7]))
}

#[test]
fn scaled_images_have_pillows_pixels() {
    let noise = image::open(folder("images").join("noise.png")).unwrap().into_rgb8();
    let cases = values("images")["noise.png"]["scaled"].as_array().unwrap();
    assert_eq!(cases.len(), 5);
    for case in cases {
        let numbers = |key: &str| -> Vec<u32> {
            case[key].as_array().unwrap().iter().map(|number| number.as_u64().unwrap() as u32).collect()
        };
        let (edges, size) = (numbers("box"), numbers("size"));
        let [left, top, right, bottom] = edges[..] else { panic!("{edges:?}") };
        let part = image::imageops::crop_imm(&noise, left, top, right - left, bottom - top).to_image();
        let scaled = Resize::exact(size[0], size[1]).apply(&part).unwrap();
        assert_eq!(scaled.dimensions(), (size[0], size[1]));
        let expected = hex(&case["rgb"]);
        assert_eq!(scaled.as_raw().len(), expected.len());
        let differences = scaled.as_raw().iter().zip(expected).map(|(a, b)| a.abs_diff(b));
        assert!(differences.max().unwrap() <= 1, "{edges:?} to {size:?}");
    }
}

#[test]
fn the_shorter_side_has_the_length_that_torchvision_gives_it() {
    for ((width, height), expected) in
        [((500, 375), (298, 224)), ((333, 500), (224, 336)), ((300, 300), (224, 224)), ((10, 3), (746, 224))]
    {
        let scaled = Resize::new(224).apply(&places(width, height)).unwrap();
        assert_eq!(scaled.dimensions(), expected);
    }
    for (image, resize) in [
        (RgbImage::new(0, 3), Resize::new(5)),
        (RgbImage::new(4, 3), Resize::new(0)),
        (RgbImage::new(4, 3), Resize::exact(3, 0)),
    ] {
        let error = resize.apply(&image).unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains("no pixel"), "{error}");
    }
    // It would have 224 x 14,679,840 pixels.
    let error = Resize::new(224).apply(&RgbImage::new(1, 65_535)).unwrap_err();
    assert!(error.is_invalid_argument() && error.to_string().contains("16384 pixels"), "{error}");
}

#[test]
fn the_middle_is_where_torchvision_cuts_it_out() {
    for ((width, height), side, (left, top)) in [
        ((9, 9), 4, (2, 2)),
        ((10, 9), 5, (2, 2)),
        ((11, 8), 4, (4, 2)),
        ((12, 9), 5, (4, 2)),
        ((5, 5), 5, (0, 0)),
    ] {
        let middle = CenterCrop::new(side).apply(&places(width, height)).unwrap();
        assert_eq!(middle.dimensions(), (side, side));
        assert_eq!(middle.get_pixel(0, 0), &Rgb([left, top, 7]), "{width} x {height}");
    }
    let error = CenterCrop::new(9).apply(&places(8, 12)).unwrap_err();
    assert!(error.is_invalid_argument() && error.to_string().contains("`Resize`"), "{error}");
}

#[test]
fn floats_have_pytorchs_bits() {
    // ToTensor and Normalize of PyTorch 2.15 and torchvision 0.29.
    let expected: [[u32; 5]; 3] = [
        [0xc007_8bbd, 0xc006_732b, 0xbf4c_9ec9, 0x3d97_af32, 0x400f_ee1d],
        [0xc002_4924, 0xc001_2a4f, 0xbf30_0b78, 0x3e52_1b48, 0x401b_6db7],
        [0xbfe6_f809, 0xbfe4_bcea, 0xbeec_bf39, 0x3eda_5d3c, 0x4028_f5c3],
    ];
    let steps = [0, 1, 77, 128, 255];
    let image = RgbImage::from_fn(5, 1, |x, _| Rgb([steps[x as usize]; 3]));
    let normalize = Normalize::imagenet();
    let found: Vec<u32> = normalize.apply(&image).into_iter().map(f32::to_bits).collect();
    assert_eq!(found, expected.concat());
    let mut batch = normalize.apply(&image);
    normalize.add_to(&image, &mut batch);
    assert_eq!(batch[..15], batch[15..]);
}

#[test]
fn a_random_part_is_scaled_as_if_it_were_an_image() {
    let noise = image::open(folder("images").join("noise.png")).unwrap().into_rgb8();
    // All of it, whatever the seed.
    let whole = RandomResizedCrop::new(8).scale(1.0..=1.0).ratio(41.0 / 30.0..=41.0 / 30.0);
    assert_eq!(whole.apply(&noise, 3).unwrap(), Resize::exact(8, 8).apply(&noise).unwrap());
    // In a frame of black: if a part is what is inside of the frame, no pixel shows the black that lies beside the part.
    let is_frame = |x: u32, y: u32| x < 4 || y < 4 || x >= 44 || y >= 44;
    let framed = RgbImage::from_fn(48, 48, |x, y| Rgb([if is_frame(x, y) { 0 } else { 200 }; 3]));
    let inside = RandomResizedCrop::new(6).scale(0.694..=0.695).ratio(1.0..=1.0);
    let parts: Vec<RgbImage> = (0..2_000).map(|seed| inside.apply(&framed, seed).unwrap()).collect();
    let same = parts.iter().filter(|part| part.pixels().all(|pixel| pixel.0 == [200; 3])).count();
    // 40 of 48 pixels can lie at 81 places.
    assert!((8..60).contains(&same), "{same}");
}

#[test]
fn random_parts_have_the_areas_and_proportions_that_are_asked_for() {
    // An image in which a pixel's colour is its place, so that the corners say what was cut out.
    let image = places(200, 150);
    let (mut areas, mut lefts) = (Vec::new(), BTreeSet::new());
    for seed in 0..2_000 {
        let part = RandomResizedCrop::new(64).apply(&image, seed).unwrap();
        assert_eq!(part.dimensions(), (64, 64));
        assert_eq!(part, RandomResizedCrop::new(64).apply(&image, seed).unwrap());
        let (first, last) = (part.get_pixel(0, 0).0, part.get_pixel(63, 63).0);
        // The outermost pixels are means of what they cover, half of a 64th of the side away from the corner.
        let side = |axis: usize| f64::from(last[axis] - first[axis]) * 64.0 / 63.0;
        areas.push(side(0) * side(1) / (200.0 * 150.0));
        let ratio = side(0) / side(1);
        assert!((0.68..1.45).contains(&ratio), "{ratio}");
        lefts.insert(first[0]);
    }
    assert!(areas.iter().all(|area| (0.06..=1.0).contains(area)));
    // Uniform from 0.08 to 1, but for large parts that do not fit with every proportion.
    let small = areas.iter().filter(|area| **area < 0.31).count();
    assert!((480..750).contains(&small), "{small}");
    assert!(lefts.len() > 80 && lefts.contains(&0));
    // What never fits is the largest part in the middle that is allowed.
    let narrow = RandomResizedCrop::new(4).scale(1.0..=1.0).apply(&places(250, 10), 1).unwrap();
    assert!(narrow.pixels().all(|pixel| (117..=132).contains(&pixel[0])), "{narrow:?}");
    assert!(RandomResizedCrop::new(4).apply(&RgbImage::new(0, 0), 1).is_err());
}

#[test]
fn what_no_image_can_be_made_with_is_refused_at_once() {
    let refused = |make: fn()| std::panic::catch_unwind(make).is_err();
    assert!(refused(|| _ = RandomHorizontalFlip::new(50.0)));
    assert!(refused(|| _ = RandomHorizontalFlip::new(f64::NAN)));
    assert!(refused(|| _ = RandomResizedCrop::new(4).scale(1.0..=0.08)));
    assert!(refused(|| _ = RandomResizedCrop::new(4).ratio(0.0..=1.0)));
    assert!(refused(|| _ = RandomResizedCrop::new(4).ratio(1.0..=f64::NAN)));
    assert!(refused(|| _ = Normalize::new([0.0; 3], [1.0, 0.0, 1.0])));
    // All pixels would be 0, or not a number, or infinite.
    assert!(refused(|| _ = Normalize::new([0.0; 3], [1.0, f32::INFINITY, 1.0])));
    assert!(refused(|| _ = Normalize::new([0.0, f32::NAN, 0.0], [1.0; 3])));
    assert!(refused(|| _ = Normalize::new([0.0; 3], [1.0, 1e-40, 1.0])));
}

#[test]
fn two_views_of_one_item_need_two_seeds() {
    let (image, crop) = (places(200, 150), RandomResizedCrop::new(32));
    assert_eq!(crop.apply(&image, 5).unwrap(), crop.apply(&image, 5).unwrap());
    assert_ne!(crop.apply(&image, 5).unwrap(), crop.apply(&image, 6).unwrap());
}

#[test]
fn a_flip_comes_as_often_as_asked_and_turns_left_and_right_around() {
    let image = places(3, 2);
    let flipped = RandomHorizontalFlip::new(1.0).apply(image.clone(), 5);
    assert_eq!(flipped.pixels().map(|pixel| pixel[0]).collect::<Vec<_>>(), [2, 1, 0, 2, 1, 0]);
    assert_eq!(RandomHorizontalFlip::new(0.0).apply(image.clone(), 5), image);
    let often = (0..1000)
        .filter(|seed| RandomHorizontalFlip::new(0.3).apply(image.clone(), *seed) == flipped)
        .count();
    assert!((250..350).contains(&often), "{often}");
}

#[test]
fn an_item_is_augmented_alike_with_any_number_of_workers() {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir(root.path().join("class")).unwrap();
    for n in 0..6 {
        places(60 + n, 50).save(root.path().join(format!("class/{n}.png"))).unwrap();
    }
    let pass = |workers: usize| {
        let (crop, flip, normalize) =
            (RandomResizedCrop::new(16), RandomHorizontalFlip::new(0.5), Normalize::imagenet());
        let images = ImageFolder::open(root.path()).unwrap().map(move |sample| {
            let seed = worker_info().unwrap().item_seed;
            Ok(normalize.apply(&flip.apply(crop.apply(&sample.image, seed)?, seed)))
        });
        let loader = DataLoader::builder(images).batch_size(2).num_workers(workers).seed(11).build().unwrap();
        let pass = || loader.iter().flat_map(Result::unwrap).collect::<Vec<_>>();
        [pass(), pass()]
    };
    let (alone, two) = (pass(0), pass(2));
    assert!(alone == two && alone[0] != alone[1]);
}
