# in one terminal
pgq install
pgq run retry:main
# in another
pgq queue charge 42
pgq failed
