#!/bin/sh
# Removes files that the service never loads from an installed environment ($1), which halves the image. Afterwards the
# build compiles the service's Java class by Spark's compiler (janino), and creates the class archive, which runs Spark,
# the decoder and Kafka's clients; so the build fails if a required jar is removed here.
set -eu
site=$(echo "$1"/lib/python3.*/site-packages)
jars=$site/pyspark/jars

grep -v '^#' deploy/spark-jars-left-out.txt | grep . | while read -r pattern; do
  # Unquoted, because it is a pattern; the build fails if it matches no jar.
  rm "$jars"/$pattern
done

# The shell of Spark Connect.
rm -r "$jars"/connect-repl
rm -r "$site"/pyspark/examples "$site"/pyspark/data
# Other interfaces of PySpark, and the copy for Python workers, which import the installed one.
rm -r "$site"/pyspark/pandas "$site"/pyspark/ml "$site"/pyspark/mllib
rm "$site"/pyspark/python/lib/pyspark.zip
# pyarrow's other file formats and RPC, its headers and sources. A rebuild by a batch job reads its file systems.
rm -r "$site"/pyarrow/tests "$site"/pyarrow/include "$site"/pyarrow/src
find "$site"/pyarrow \( -name '*flight*' -o -name '_substrait*' -o -name '*_cpp_tests*' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.pxi' \) \
  -delete
# Two of three copies of each file, which wheels contain instead of links. Programs load the third.
find "$site"/pyarrow \( -name 'libarrow_python*.so' -o -name 'libarrow_python*.so.*.*.*' \) -delete
find "$site" -type d -name tests -prune -exec rm -r {} +

# No further packages are installed.
rm -rf "$site"/pip "$site"/pip-* "$site"/setuptools "$site"/setuptools-* "$site"/pkg_resources "$1"/bin/pip*
find "$1" -name '*.pyc' -delete
