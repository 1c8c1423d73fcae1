#!/bin/sh
# Take out of an installed environment ($1) what the service never loads: it halves the image. After this Spark's own
# compiler (janino) makes the service's one Java class, and the class archive runs Spark and the decoder and opens Kafka's
# clients, so a jar too many taken here fails the build.
set -eu
site=$(echo "$1"/lib/python3.*/site-packages)
jars=$site/pyspark/jars

grep -v '^#' deploy/spark-jars-left-out.txt | grep . | while read -r pattern; do
  # Not quoted: a pattern; one that no jar is named by any more fails the build.
  rm "$jars"/$pattern
done

# The shell of Spark Connect.
rm -r "$jars"/connect-repl
rm -r "$site"/pyspark/examples "$site"/pyspark/data
# PySpark's other interfaces, and the copy of it that Spark's Python workers would read: none is started.
rm -r "$site"/pyspark/pandas "$site"/pyspark/ml "$site"/pyspark/mllib
rm "$site"/pyspark/python/lib/pyspark.zip
# pyarrow's other file formats, file systems and RPC, its headers and sources.
rm -r "$site"/pyarrow/tests "$site"/pyarrow/include "$site"/pyarrow/src
find "$site"/pyarrow \( -name '*flight*' -o -name '_substrait*' -o -name '*s3fs*' -o -name 'libarrow_s3*' \
  -o -name '*azurefs*' -o -name '*gcsfs*' -o -name '*_cpp_tests*' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.pxi' \) \
  -delete
# Two of three equal files: links, before a wheel made copies of them. Programs load the third.
find "$site"/pyarrow \( -name 'libarrow_python*.so' -o -name 'libarrow_python*.so.*.*.*' \) -delete
find "$site" -type d -name tests -prune -exec rm -r {} +

# Packages are installed; none will be.
rm -rf "$site"/pip "$site"/pip-* "$site"/setuptools "$site"/setuptools-* "$site"/pkg_resources "$1"/bin/pip*
find "$1" -name '*.pyc' -delete
